"""Whose requests are answered, how every refusal is, and what is logged of each."""

import hmac
import logging
import os
import time
from collections.abc import Collection, Sequence
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.base.errors import ConfigError
from atoll.base.format import code_version
from atoll.base.safe_parse import read_lines
from atoll.serve.metrics import Metrics
from atoll.serve.request import ApiError

SHORTEST = 16
"""Characters of a key."""
LOG = logging.getLogger("atoll.serve")
QUIET = ("/health", "/ready", "/metrics", "/assets/", "/dashboard/")
"""Paths that machines and pages ask for again and again: they are logged at level DEBUG."""


class Keys:
    """What a request must bring.

    Args:
        keys: one of which it must; none lets everybody in.
        metrics: where refusals are counted.
        open_paths: paths that answer without one; one that ends in a slash stands for all below it.
    """

    def __init__(self, keys: Sequence[str], metrics: Metrics, open_paths: Collection[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]
        self._metrics, self._open = metrics, open_paths
        self._below = tuple(path for path in open_paths if path.endswith("/") and path != "/")

    async def __call__(self, request: Request) -> None:
        """Let a request in; `ApiError` if it brings no valid key."""
        path = request.url.path
        if not self._digests or path in self._open or path.startswith(self._below):
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = sha256(key.strip().encode()).digest()
        # Every key is looked at, so that the time says nothing of which one was near.
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            self._metrics.rejected.labels("key").inc()
            raise ApiError(401, "no valid key: send 'Authorization: Bearer KEY'", "invalid_api_key")


class RequestLog:
    """Middleware that logs one line a request: no prompt, no query and no key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log it once its answer is sent."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, status = time.monotonic(), 500

        async def note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, note)
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
        lines = [line.strip() for line in read_lines(path)]
        written = [line for line in lines if line and not line.startswith("#")]
        if not written:
            raise ConfigError(f"{path} holds no key", "write one a line")
        keys += written
    if any(len(key) < SHORTEST for key in keys):
        what = f"a key is shorter than {SHORTEST} characters"
        raise ConfigError(what, "make it longer: openssl rand -hex 24")
    return keys
