"""The pages of a server, playground and dashboard: static files, and what the second reads."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import cache
from hashlib import sha256

from fastapi import FastAPI, Request, Response
from jinja2 import ChoiceLoader, Environment, PackageLoader, PrefixLoader

from atoll.base.errors import AtollError
from atoll.report.charts import ring, stylesheet
from atoll.report.page import Dashboard, environment
from atoll.serve.guard import ApiError

EVERY = 5
"""Seconds between two looks of a dashboard's page."""
EXPERTS = 64
"""Experts that have a colour."""
OPEN_PAGES = ("/", "/dashboard", "/assets/")
"""Pages that hold nothing of a model or campaign, and so need no key."""
# Prompts and captions of strangers are shown: even if one were taken for HTML, no script of it would run.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_pages(app: FastAPI, playground: bool, dashboard: Dashboard | None) -> None:
    """Add what there is of the two pages to an application; the first of them is at `/`."""
    pages = [("/", "Playground")] if playground else []
    pages += [("/dashboard" if playground else "/", "Dashboard")] if dashboard else []
    for place, name in pages:
        template = _templates().get_template(f"web/{name.lower()}.html")
        about = {"script": f"{name.lower()}.js", "here": name, "pages": pages, "every": EVERY}
        text = template.render(ring=ring([5, 4, 3, 2, 2]), **about)
        app.get(place)(lambda text=text: Response(text, headers=HEADERS, media_type="text/html"))

    @app.get("/assets/{name}")
    async def asset(name: str) -> Response:
        if name not in _assets():
            raise ApiError(404, "there is no such file", "not_found")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(_assets()[name], headers=HEADERS, media_type=kind)

    if dashboard is not None:
        app.get("/dashboard/now")(_fragment(dashboard.now, EVERY / 2))
        app.get("/dashboard/still")(_fragment(dashboard.still, 60.0))


def _fragment(make: Callable[[], str], seconds: float) -> Callable[..., object]:
    """An endpoint that answers with what a function gives, made anew after so many seconds."""
    lock, made, text = threading.Lock(), 0.0, ""

    def latest() -> str:
        nonlocal made, text
        with lock:  # many pages cost one look at the campaign
            if not text or time.monotonic() - made > seconds:
                text, made = make(), time.monotonic()
            return text

    async def answer(request: Request) -> Response:
        try:
            content = (await asyncio.to_thread(latest)).encode("utf-8", "replace")
        except AtollError as error:
            raise ApiError(503, str(error), "unreadable", after=EVERY) from None
        headers = {**HEADERS, "ETag": f'"{sha256(content).hexdigest()[:32]}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type="text/html")

    return answer


@cache
def _templates() -> Environment:
    own = PrefixLoader({"web": PackageLoader("atoll.serve", "web")})
    report = environment()
    assert report.loader is not None
    return report.overlay(loader=ChoiceLoader([report.loader, own]))


@cache
def _assets() -> dict[str, str]:
    """The style sheet and the scripts, by name."""

    def source(name: str) -> str:
        return _templates().loader.get_source(_templates(), name)[0]  # type: ignore[union-attr]

    style = [source("style.css"), stylesheet(EXPERTS), source("web/page.css")]
    scripts = ("common.js", "dashboard.js", "playground.js")
    return {"style.css": "\n".join(style), **{name: source(f"web/{name}") for name in scripts}}
