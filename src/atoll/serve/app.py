"""The HTTP side of a server: OpenAI's images API over an engine. It never touches torch."""

import asyncio
import base64
import io
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from PIL import Image
from starlette.requests import ClientDisconnect

from atoll.base.errors import ConfigError
from atoll.base.version import code_version
from atoll.report.dashboard import Dashboard
from atoll.serve.engine import FAILED, READY, Engine, Refused
from atoll.serve.guard import Keys, new_app
from atoll.serve.job import Event, Failed, Finished, Job, Partial
from atoll.serve.pages import OPEN_PAGES, add_pages
from atoll.serve.request import ApiError, ImageRequest, listed, parse, split_model
from atoll.serve.settings import ServeSettings

STATUS = {"invalid_request": 400, "deadline_exceeded": 504, "server_stopped": 503}
"""Of a failure's code; 500 of others."""
USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}
"""Pictures cost no tokens here, but OpenAI's client reads them of a stream."""
OPEN = ("/health", "/ready", "/version")
"""What answers without a key."""


def create_app(
    engine: Engine,
    settings: ServeSettings,
    keys: Sequence[str] = (),
    dashboard: Dashboard | None = None,
    told: Mapping[int, str] | None = None,
) -> FastAPI:
    """The application.

    Args:
        engine: draws.
        settings: bounds.
        keys: bearer keys, one of which a request must bring; none lets everybody in.
        dashboard: of the campaign whose models these are, if they are of one.
        told: what is known of the experts' clusters, by number.
    """
    app = new_app(Keys(keys, engine.metrics, (*OPEN, *OPEN_PAGES)))
    add_pages(app, True, dashboard)
    kept: OrderedDict[str, tuple[bytes, str]] = OrderedDict()
    started = int(time.time())

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        if engine.state == READY:
            return JSONResponse({"status": READY})
        reason = str(engine.error) if engine.state == FAILED else engine.state
        return JSONResponse({"status": engine.state, "reason": reason}, 503)

    @app.get("/version")
    async def versions() -> dict[str, str]:
        return {"atoll": code_version()}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = listed(engine.names)
        return {"object": "list", "data": [_model(engine, name, started, told) for name in names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        split_model(name, engine.names)
        return _model(engine, name, started, told)

    @app.get("/v1/images/{name}")
    async def picture(name: str) -> Response:
        if name not in kept:
            raise ApiError(404, "there is no such picture (any more)", "not_found")
        content, kind = kept[name]
        return Response(content, media_type=f"image/{kind}")

    @app.post("/v1/images/generations")
    async def generations(request: Request) -> Response:
        asked = parse(await _body(request, settings.body_bytes))
        job, events = _submit(engine, settings, asked)
        kind, quality = asked.output_format or "png", asked.output_compression

        if asked.stream:
            return StreamingResponse(_stream(job, events, kind, quality), media_type="text/event-stream")
        watch = asyncio.ensure_future(_watched(request, job))
        try:
            done = await _all(job, events)
        finally:
            watch.cancel()
            job.cancelled = job.cancelled or bool(job.waiting)
        data = []
        contents = await asyncio.to_thread(lambda: [_bytes(one.image, kind, quality) for one in done])
        for one, content in zip(done, contents, strict=True):
            entry = _facts(job, one)
            if asked.response_format == "url":
                name = f"{secrets.token_urlsafe(16)}.{kind}"
                kept[name] = content, kind
                while len(kept) > settings.kept:
                    kept.popitem(last=False)
                entry["url"] = f"{request.base_url}v1/images/{name}"
            else:
                entry["b64_json"] = base64.b64encode(content).decode()
            data.append(entry)
        width, height = engine.sizes[job.model]
        about = {"output_format": kind, "size": f"{width}x{height}", "model": job.model}
        return JSONResponse({"created": int(time.time()), "data": data, **about})

    return app


def _submit(
    engine: Engine, settings: ServeSettings, asked: ImageRequest
) -> tuple[Job, "asyncio.Queue[Event]"]:
    """Check a request and hand it to the engine."""
    if engine.state != READY:
        raise ApiError(503, f"the server is {engine.state}", engine.state, after=5)
    name, routing = split_model(asked.model, engine.names)
    model, (width, height) = engine.opened[name], engine.sizes[name]
    count, size = asked.n or 1, asked.size
    if size not in (None, "auto", f"{width}x{height}"):
        what = f"this model draws no pictures of {size[:40]!r}: valid: auto, {width}x{height}"
        raise ApiError(400, what, "invalid_size", "size")
    for param, refused, what in (
        ("n", count > settings.pictures, f"at most {settings.pictures} pictures a request"),
        ("steps", (asked.steps or 1) > settings.steps, f"at most {settings.steps}"),
        ("partial_images", asked.partial_images and not asked.stream, "they come with stream=true only"),
        ("response_format", asked.stream and asked.response_format == "url", "streams bring b64_json"),
        ("routing", asked.routing and model.bank.router is None, f"{name} is one network"),
    ):
        if refused:
            raise ApiError(400, f"{param}: {what}", "invalid_value", param)
    how = asked.model_dump(include={"seed", "steps", "guidance", "shift"}, exclude_none=True)
    try:
        how = {"seed": secrets.randbits(31), "routing": asked.routing or routing, **how}
        generation = model.generation.with_(**how)
        if generation.routing.needs_labels:
            raise ConfigError("routing 'oracle' needs known clusters", "use another strategy")
    except ConfigError as error:
        wrong = "routing" if asked.routing or routing else None
        raise ApiError(400, str(error), "invalid_value", wrong) from None
    events: asyncio.Queue[Event] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def tell(event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            loop.call_soon_threadsafe(events.put_nowait, event)

    job = Job(
        name,
        () if model.card.condition == "none" and not asked.prompt else (asked.prompt,),
        generation,
        tell,
        asked.negative or "",
        count,
        asked.partial_images or 0,
        deadline=time.monotonic() + settings.deadline,
    )
    try:
        engine.submit(job)
    except Refused as refused:
        status = 429 if refused.code == "queue_full" else 503
        raise ApiError(status, refused.message, refused.code, after=refused.after) from None
    except ConfigError as error:
        raise ApiError(400, str(error), "invalid_value") from None
    return job, events


async def _all(job: Job, events: "asyncio.Queue[Event]") -> list[Finished]:
    """Every picture of a request, by number."""
    done: list[Finished] = []
    while len(done) < job.count:
        event = await events.get()
        if isinstance(event, Failed):
            raise _failure(event)
        if isinstance(event, Finished):
            done.append(event)
    return sorted(done, key=lambda one: one.number)


async def _stream(
    job: Job,
    events: "asyncio.Queue[Event]",
    kind: str,
    quality: int | None,
) -> AsyncIterator[bytes]:
    """Server-sent events, as OpenAI's client reads them."""
    left = job.count
    try:
        while left:
            event = await events.get()
            if isinstance(event, Failed):
                yield f"event: error\ndata: {json.dumps(_failure(event).body)}\n\n".encode()
                return
            width, height = event.image.size
            content = await asyncio.to_thread(_bytes, event.image, kind, quality)
            about = {
                "b64_json": base64.b64encode(content).decode(),
                "created_at": int(time.time()),
                "size": f"{width}x{height}",
                "quality": "auto",
                "background": "opaque",
                "output_format": kind,
            }
            if isinstance(event, Partial):
                name = "image_generation.partial_image"
                about |= {"partial_image_index": event.index, "number": event.number}
            else:
                name = "image_generation.completed"
                about |= _facts(job, event) | {"usage": USAGE}
                left -= 1
            yield f"event: {name}\ndata: {json.dumps({'type': name, **about})}\n\n".encode()
        yield b"data: [DONE]\n\n"
    finally:
        job.cancelled = job.cancelled or bool(job.waiting)


def _facts(job: Job, one: Finished) -> dict[str, Any]:
    """What is told of a picture: enough to draw it again, and who painted it."""
    how = job.generation
    facts: dict[str, Any] = {"seed": how.seed, "number": one.number, "steps": how.steps}
    if one.routing is not None:
        facts["routing"] = {"strategy": str(how.routing), "steps": one.routing}
    return facts | {"guidance": how.guidance}


def _failure(event: Failed) -> ApiError:
    status = STATUS.get(event.code, 500)
    return ApiError(status, event.message, event.code, after=None if event.repeats else 5)


async def _watched(request: Request, job: Job) -> None:
    """Give a request up when its client has gone."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)
    job.cancelled = True


async def _body(request: Request, most: int) -> Any:
    """The JSON value of a body that is not too long."""
    parts, size = list[bytes](), 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise ApiError(413, f"the body is longer than {most:,} bytes", "body_too_large")
            parts.append(part)
    except ClientDisconnect:
        raise ApiError(400, "the body ended early", "invalid_json") from None
    try:
        return json.loads(b"".join(parts))
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is no JSON", "invalid_json") from None


def _bytes(image: Image.Image, kind: str, quality: int | None) -> bytes:
    out = io.BytesIO()
    if kind == "png":
        image.save(out, "PNG")
    else:
        image.convert("RGB").save(out, kind.upper(), quality=85 if quality is None else quality)
    return out.getvalue()


def _model(engine: Engine, name: str, created: int, told: Mapping[int, str] | None) -> dict[str, Any]:
    """As OpenAI lists a model; what it draws by that is told nothing else comes beside, once it is loaded."""
    base, _, routing = name.partition(":")
    about = engine.about(base, routing)
    if about is not None and "experts" in about and told:
        about["told"] = told
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "atoll",
        "atoll": about,
    }
