"""What both applications share: requests and errors as OpenAI's client has them, keys, a log, pages."""

import asyncio
import hmac
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Sequence
from functools import cache
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from jinja2 import ChoiceLoader, Environment, PackageLoader, PrefixLoader
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.base.errors import AtollError, ConfigError, nearest
from atoll.base.format import code_version
from atoll.base.safe_parse import read_text
from atoll.report.charts import ring, stylesheet
from atoll.report.page import Dashboard, environment
from atoll.serve.metrics import Metrics

LONGEST = 32_000
"""Characters of a prompt, as OpenAI allows."""
EVERY_STRATEGY = ("full", "top-1", "top-2", "once", "once null sample-1")
"""Strategies that are listed as models of their own; `routing` takes any."""


class ImageRequest(BaseModel):
    """`POST /v1/images/generations`; `quality`, `style`, `background`, `moderation`, `user` do nothing."""

    # Unknown fields are refused: with `stepz` ignored, another picture would be drawn silently.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    # All but the prompt may be null, as clients write what they were not given.
    prompt: str = Field(max_length=LONGEST)
    model: str | None = None
    n: int | None = Field(default=None, ge=1)
    size: str | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: int | None = Field(default=None, ge=0, le=100)
    stream: bool | None = None
    partial_images: int | None = Field(default=None, ge=0, le=3)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    steps: int | None = Field(default=None, ge=1)
    guidance: float | None = Field(default=None, ge=0, le=1e6)
    shift: float | None = Field(default=None, ge=1e-4, le=1e4)
    routing: str | None = Field(default=None, max_length=200)
    negative: str | None = Field(default=None, max_length=LONGEST)
    quality: str | None = None
    style: str | None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: str | None = None
    user: str | None = None


class ApiError(Exception):
    """What is answered in place of pictures: a status, a body as OpenAI's client reads it, and headers.

    With `after`, the client should try again in so many seconds; else a retry would repeat the error.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, after: float | None = None
    ) -> None:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}
        retry = {"x-should-retry": "false"}
        self.headers = retry if after is None else {"Retry-After": str(max(1, round(after)))}
        super().__init__(message)


def parse(body: Any) -> ImageRequest:
    """The request in a JSON value; `ApiError` names the first field that is wrong."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body is no JSON object", "invalid_json")
    try:
        return ImageRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])[:100] if first["loc"] else None
        what, code = f"{name}: {first['msg']}", "invalid_value"
        if first["type"] == "missing":
            code = "missing_required_parameter"
        elif first["type"] == "extra_forbidden":
            hint = nearest(str(name), ImageRequest.model_fields)
            what, code = f"there is no field {name!r}: {hint}", "unknown_parameter"
        raise ApiError(400, what, code, name) from None


def split_model(name: str | None, models: list[str]) -> tuple[str, str | None]:
    """The model and the strategy that a name such as `ensemble:top-1` means; `ApiError` if there is none."""
    base, _, routing = (name or models[0]).partition(":")
    if base not in models or (routing and base != "ensemble") or len(routing) > 200:
        hint = nearest(str(name)[:100], listed(models))
        raise ApiError(404, f"there is no model {str(name)[:100]!r}: {hint}", "model_not_found", "model")
    return base, routing or None


def listed(models: list[str]) -> list[str]:
    """Names under which the models can be asked for."""
    strategies = [f"ensemble:{strategy}" for strategy in EVERY_STRATEGY] if "ensemble" in models else []
    return [*models, *strategies]


SHORTEST = 16
"""Characters of a key."""
LOG = logging.getLogger("atoll.serve")
QUIET = ("/health", "/ready", "/metrics", "/assets/", "/dashboard/")
"""Paths that machines and pages ask for again and again: they are logged at level DEBUG."""


class Keys:
    """What a request must bring.

    Args:
        keys: one of which it must; without any, requests of foreign web pages alone are refused.
        metrics: where refusals are counted.
        open_paths: paths that answer without one; one that ends in a slash stands for all below it.
        hosts: names of this server beside its addresses, `localhost` and the machine's own.
    """

    def __init__(
        self, keys: Sequence[str], metrics: Metrics, open_paths: Collection[str], hosts: Sequence[str] = ()
    ) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]
        self._metrics, self._open = metrics, open_paths
        self._hosts = {"localhost", socket.gethostname().lower(), *(name.lower() for name in hosts)}
        self._below = tuple(path for path in open_paths if path.endswith("/") and path != "/")

    async def __call__(self, request: Request) -> None:
        """Let a request in; `ApiError` if it brings no valid key, or without keys comes of a foreign page."""
        path = request.scope["path"]  # the URL would be made of what the client says is the host
        if not self._digests:
            return self._check_origin(request.headers.get("host"), request.headers.get("origin"))
        if path in self._open or path.startswith(self._below):
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = sha256(key.strip().encode()).digest()
        # Every key is looked at, so that the time says nothing of which one was near.
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            self._metrics.rejected.labels("key").inc()
            raise ApiError(401, "no valid key: send 'Authorization: Bearer KEY'", "invalid_api_key")

    def _check_origin(self, host: str | None, origin: str | None) -> None:
        # Any web page can make its visitor's browser send requests to this address, and read the answers if a
        # name of its own is pointed here (DNS rebinding). An address as host cannot have been pointed.
        if host is None:
            return
        name, problem = host.rpartition(":")[0] if re.search(r":\d*$", host) else host, ""
        try:
            ip_address(name.strip("[]"))
        except ValueError:
            if name.lower() not in self._hosts:
                problem = f"{name[:100]!r} is no name of this server: start it with --set hosts=[NAME], or"
        if origin is not None and origin.partition("://")[2] != host:
            problem = problem or f"pages of {origin[:100]!r} may not use this server: start it"
        if problem:
            self._metrics.rejected.labels("origin").inc()
            raise ApiError(403, f"{problem} with --keys FILE", "forbidden_origin")


class RequestLog:
    """Middleware that logs one line a request: no prompt, no query and no key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log it once its answer is sent."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, status = time.monotonic(), 500
        # Probes ask for heads; uvicorn sends no body for them.
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(asked, receive, note)
        finally:
            # Quoted, so that a line's end is %0A: a path could else forge lines of the log.
            path = quote(scope["path"][:200], safe="/:")
            facts, job = [f"{scope['method']} {path} {status}"], scope.get("state", {}).get("job")
            if job is not None:
                facts += [job.model, f"{job.count} image{'s' * (job.count > 1)}", *filter(None, [job.failed])]
            level = logging.DEBUG if status < 400 and path.startswith(QUIET) else logging.INFO
            LOG.log(level, "%s, %.2f s", ", ".join(facts), time.monotonic() - started)


def new_app(keys: Keys) -> FastAPI:
    """An application without routes that lets in whom the keys let in, and whose errors are OpenAI's."""
    # Without /docs: that page loads its scripts from elsewhere, which no page of this server does.
    app = FastAPI(
        title="Atoll", version=code_version(), docs_url=None, redoc_url=None, dependencies=[Depends(keys)]
    )
    app.add_middleware(RequestLog)

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            path = f"{request.method} {request.url.path[:200]}"
            if error.status_code == 405:
                allowed = (error.headers or {})["Allow"]
                error = ApiError(405, f"{path}: this path takes {allowed}", "method_not_allowed")
            else:
                what = "not implemented" if path.partition(" ")[2].startswith("/v1/") else error.detail
                error = ApiError(error.status_code, f"{path}: {what}", "not_found")
        elif not isinstance(error, ApiError):
            # What an unforeseen error says may name files or hosts, which are nobody's business out there.
            error = ApiError(500, "the server failed to answer; its log says why", "internal_error")
        return JSONResponse(error.body, error.status, error.headers)

    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
    return app


def read_keys(path: Path | None) -> list[str]:
    """Bearer keys, one a line; those of ATOLL_KEYS, by commas, too. `ConfigError` of those that are none."""
    keys = [key.strip() for key in os.environ.get("ATOLL_KEYS", "").split(",") if key.strip()]
    if path is not None:
        lines = map(str.strip, read_text(path).splitlines())
        if not (written := [key for key in lines if key and not key.startswith("#")]):
            raise ConfigError(f"{path} holds no key", "write one a line")
        keys += written
    if any(len(key) < SHORTEST for key in keys):
        raise ConfigError(f"a key has under {SHORTEST} characters", "make it longer: openssl rand -hex 24")
    return keys


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
    lock, made, content = asyncio.Lock(), 0.0, b""

    async def answer(request: Request) -> Response:
        nonlocal made, content
        async with lock:  # many pages cost one look at the campaign, and one thread
            if not content or time.monotonic() - made > seconds:
                try:
                    content = (await asyncio.to_thread(make)).encode("utf-8", "replace")
                except AtollError as error:
                    raise ApiError(503, str(error), "unreadable", after=EVERY) from None
                made = time.monotonic()
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
