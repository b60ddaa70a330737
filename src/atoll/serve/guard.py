"""Whose requests are answered, and how every refusal is."""

import hmac
import os
from collections.abc import Collection, Sequence
from hashlib import sha256
from pathlib import Path

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from atoll.base.errors import ConfigError
from atoll.serve.metrics import Metrics
from atoll.serve.request import ApiError

SHORTEST = 16
"""Characters of a key."""


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


def new_app(keys: Keys) -> FastAPI:
    """An application without routes that lets in whom the keys let in, and whose errors are OpenAI's."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(keys)])

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            what = f"{request.method} {request.url.path[:200]}: {error.detail}"
            error = ApiError(error.status_code, what, "not_found")
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
        try:
            lines = path.read_text().splitlines()
        except (OSError, ValueError) as error:
            what = f"the keys in {path} cannot be read ({error})"
            raise ConfigError(what, "give a file of one key a line") from None
        written = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not written:
            raise ConfigError(f"{path} holds no key", "write one a line")
        keys += written
    if any(len(key) < SHORTEST for key in keys):
        what = f"a key is shorter than {SHORTEST} characters"
        raise ConfigError(what, "make it longer: openssl rand -hex 24")
    return keys
