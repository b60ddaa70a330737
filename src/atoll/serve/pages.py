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
from atoll.report import palette
from atoll.report.charts import ring
from atoll.report.dashboard import Dashboard
from atoll.report.html import environment
from atoll.serve.request import ApiError

EVERY = 5
"""Seconds between two looks of a dashboard's page."""
EXPERTS = 64
"""Experts that have a colour."""
OPEN_PAGES = ("/", "/dashboard", "/assets/")
"""Pages that hold nothing of a model or campaign, and so need no key."""
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
        text = _page(name, pages)
        app.get(place)(lambda text=text: Response(text, headers=HEADERS, media_type="text/html"))

    @app.get("/assets/{name}")
    async def asset(name: str) -> Response:
        found = _assets().get(name)
        if found is None:
            raise ApiError(404, "there is no such file", "not_found")
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        return Response(found, headers=HEADERS, media_type=kind)

    if dashboard is not None:
        now, still = _Kept(dashboard.now, EVERY / 2), _Kept(dashboard.still, 60.0)

        @app.get("/dashboard/now")
        async def dashboard_now(request: Request) -> Response:
            return await _fragment(now, request)

        @app.get("/dashboard/still")
        async def dashboard_still(request: Request) -> Response:
            return await _fragment(still, request)


class _Kept:
    """What a function last gave, for a while: many pages cost one look."""

    def __init__(self, make: Callable[[], str], seconds: float) -> None:
        self._make, self._seconds = make, seconds
        self._lock, self._made, self._text = threading.Lock(), 0.0, ""

    def __call__(self) -> str:
        with self._lock:
            if not self._text or time.monotonic() - self._made > self._seconds:
                self._text, self._made = self._make(), time.monotonic()
            return self._text


async def _fragment(kept: _Kept, request: Request) -> Response:
    try:
        text = await asyncio.to_thread(kept)
    except AtollError as error:
        raise ApiError(503, str(error), "unreadable", after=EVERY) from None
    content = text.encode("utf-8", "replace")
    headers = {**HEADERS, "ETag": f'"{sha256(content).hexdigest()[:32]}"'}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type="text/html")


@cache
def _templates() -> Environment:
    own = PrefixLoader({"web": PackageLoader("atoll.serve", "web")})
    report = environment()
    assert report.loader is not None
    return report.overlay(loader=ChoiceLoader([report.loader, own]))


def _page(name: str, pages: list[tuple[str, str]]) -> str:
    lower = name.lower()
    template = _templates().get_template(f"web/{lower}.html")
    return template.render(
        script=f"{lower}.js", here=name, pages=pages, ring=ring([5, 4, 3, 2, 2]), every=EVERY
    )


@cache
def _assets() -> dict[str, str]:
    """The style sheet and the scripts, by name."""
    loader = _templates()
    source = loader.loader.get_source  # type: ignore[union-attr]
    style = [source(loader, one)[0] for one in ("style.css", "web/page.css")]
    scripts = ("common.js", "dashboard.js", "playground.js")
    return {
        "style.css": "\n".join([style[0], palette.stylesheet(EXPERTS), style[1]]),
        **{name: source(loader, f"web/{name}")[0] for name in scripts},
    }
