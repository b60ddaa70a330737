"""`atoll serve` and `atoll dashboard`: OpenAI's images API over an engine. It never touches torch."""

import asyncio
import base64
import io
import json
import secrets
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from ipaddress import ip_address
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from PIL import Image
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import ConfigError, StoreError
from atoll.base.format import code_version
from atoll.campaign.card_facts import COMPARISON, prompts
from atoll.campaign.folder import FROZEN, Campaign
from atoll.campaign.report_table import of_clusters
from atoll.campaign.roles import BESIDE
from atoll.campaign.sample import load_model
from atoll.model.checkpoint import Checkpoint
from atoll.model.folder import MANIFEST
from atoll.model.generation import Generation
from atoll.model.model import ENSEMBLE, Model
from atoll.model.opened import is_hub_name
from atoll.report.page import Dashboard
from atoll.serve.app import (
    OPEN_PAGES,
    ApiError,
    ImageRequest,
    Keys,
    add_pages,
    listed,
    new_app,
    parse,
    split_model,
)
from atoll.serve.engine import FAILED, READY, Drawn, Engine, Event, Failed, Job, Refused
from atoll.serve.metrics import Metrics
from atoll.serve.settings import ServeSettings
from atoll.store.store import Store

STATUS = {"invalid_request": 400, "cancelled": 499, "deadline_exceeded": 504, "server_stopped": 503}
"""Of a failure's code; 500 of others."""
USAGE: dict[str, Any] = dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), 0)
USAGE["input_tokens_details"] = {"image_tokens": 0, "text_tokens": 0}
"""Pictures cost no tokens here, but OpenAI's client reads them of a stream."""
OPEN = ("/health", "/ready", "/version", "/openapi.json")
"""What answers without a key."""
Events = asyncio.Queue[Event]


def create_app(
    engine: Engine,
    settings: ServeSettings,
    keys: Sequence[str] = (),
    dashboard: Dashboard | None = None,
    clusters: Mapping[int, str] | None = None,
    examples: Sequence[str] = (),
) -> FastAPI:
    """The application over an engine; with `keys`, a request must bring one of them.

    `clusters` are what is known of the experts' by number, `examples` prompts to try.
    """
    app = new_app(Keys(keys, engine.metrics, (*OPEN, *OPEN_PAGES), settings.hosts))
    add_pages(app, True, dashboard)
    linked: OrderedDict[str, tuple[bytes, str]] = OrderedDict()
    started = int(time.time())

    def describe(name: str) -> dict[str, Any]:
        """A model as OpenAI lists it; how it draws by itself comes beside, once it is loaded."""
        base, _, routing = name.partition(":")
        if (about := engine.about(base, routing)) is not None:
            about |= {"clusters": clusters} if "experts" in about and clusters else {}
            about |= {"prompts": examples} if examples else {}
        return {"id": name, "object": "model", "created": started, "owned_by": "atoll", "atoll": about}

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
        return {"object": "list", "data": [describe(name) for name in listed(engine.names)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        base, routing = split_model(name, engine.names)
        if routing and engine.state == READY:
            _generation(engine.opened[base], routing)
        return describe(name)

    @app.get("/v1/images/files/{name}")
    async def picture(name: str) -> Response:
        if name not in linked:
            raise ApiError(404, "there is no such picture (any more)", "not_found")
        content, kind = linked[name]
        return Response(content, media_type=f"image/{kind}")

    body_schema = {"application/json": {"schema": ImageRequest.model_json_schema()}}

    @app.post("/v1/images/generations", openapi_extra={"requestBody": {"content": body_schema}})
    async def generations(request: Request) -> Response:
        # Browsers send JSON to another origin only after asking for leave, which is never given.
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "send the header 'Content-Type: application/json'", "invalid_content_type")
        # The body is read and bounded here: FastAPI would read all of it before anything could refuse it.
        body = bytearray()
        try:
            async for part in request.stream():
                body += part
                if len(body) > settings.body_bytes:
                    what = f"the body is longer than {settings.body_bytes:,} bytes"
                    raise ApiError(413, what, "body_too_large")
            asked = parse(json.loads(body))
        except ClientDisconnect:
            raise ApiError(400, "the body ended early", "invalid_json") from None
        except (ValueError, RecursionError):
            raise ApiError(400, "the body is no JSON", "invalid_json") from None
        job, events = _submit(engine, settings, asked)
        request.state.job = job
        kind, quality = asked.output_format or "png", asked.output_compression
        if asked.stream:
            return StreamingResponse(_stream(job, events, kind, quality), media_type="text/event-stream")

        async def watch() -> None:
            """Give the request up when its client has gone."""
            while not await request.is_disconnected():
                await asyncio.sleep(0.1)
            job.cancelled = True
            # The engine tells nothing more of it, so whoever waits for its pictures would wait for ever.
            events.put_nowait(Failed("cancelled", "the client has gone"))

        # Starlette says nothing of a client that leaves while an answer is being made, so it is asked.
        watching = asyncio.ensure_future(watch())
        try:
            done: list[Drawn] = []
            while len(done) < job.count:
                event = await events.get()
                if isinstance(event, Failed):
                    raise _refusal(event)
                if event.index is None:
                    done.append(event)
        finally:
            watching.cancel()
            job.cancelled = job.cancelled or bool(job.waiting)
        done.sort(key=lambda event: event.number)
        # Not in the loop: compressing a large picture takes long enough that others would notice.
        contents = await asyncio.to_thread(lambda: [_bytes(event.image, kind, quality) for event in done])
        data = []
        for event, content in zip(done, contents, strict=True):
            entry = _facts(job, event)
            if asked.response_format == "url":
                name = f"{secrets.token_urlsafe(16)}.{kind}"
                linked[name] = content, kind
                while len(linked) > settings.kept:
                    linked.popitem(last=False)
                entry["url"] = f"{request.base_url}v1/images/files/{name}"
            else:
                entry["b64_json"] = base64.b64encode(content).decode()
            data.append(entry)
        width, height = done[0].image.size
        about = {"output_format": kind, "size": f"{width}x{height}", "model": job.model}
        return JSONResponse({"created": int(time.time()), "data": data, **about})

    return app


def _submit(engine: Engine, settings: ServeSettings, asked: ImageRequest) -> tuple[Job, Events]:
    """Check a request and hand it to the engine."""
    if engine.state != READY:
        raise ApiError(503, f"the server is {engine.state}", engine.state, after=5)
    name, routing = split_model(asked.model, engine.names)
    model, count, size = engine.opened[name], asked.n or 1, None if asked.size == "auto" else asked.size
    sizes, by_url = [f"{w}x{h}" for w, h in engine.sizes[name]], asked.response_format == "url"
    if size is not None and size not in sizes:
        what = f"this model draws no pictures of {size[:40]!r}: valid: auto, {', '.join(sizes)}"
        raise ApiError(400, what, "invalid_size", "size")
    for param, refused, what in (
        ("n", count > settings.pictures, f"at most {settings.pictures} pictures a request"),
        ("steps", (asked.steps or 1) > settings.steps, f"at most {settings.steps}"),
        ("partial_images", asked.partial_images and not asked.stream, "they come with stream=true only"),
        ("response_format", by_url and asked.stream, "streams bring b64_json"),
        ("response_format", by_url and count > settings.kept, f"this server keeps {settings.kept} pictures"),
        ("routing", asked.routing and model.bank.router is None, f"{name} is one network"),
    ):
        if refused:
            raise ApiError(400, f"{param}: {what}", "invalid_value", param)
    how = asked.model_dump(include={"seed", "steps", "guidance", "shift"}, exclude_none=True)
    # Without a seed a request gets one, which the answer tells, so that it can be drawn again.
    how = {"seed": secrets.randbits(31), **how, "size": size}
    generation = _generation(model, asked.routing or routing, **how)
    events: Events = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def tell(event: Event) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            loop.call_soon_threadsafe(events.put_nowait, event)

    prompts = () if model.card.condition == "none" and not asked.prompt else (asked.prompt,)
    negative, partial_images = asked.negative or "", asked.partial_images or 0
    deadline = time.monotonic() + settings.deadline
    job = Job(name, prompts, generation, tell, negative, count, partial_images, deadline=deadline)
    try:
        engine.submit(job)
    except Refused as refusal:
        status = 429 if refusal.code == "queue_full" else 503
        raise ApiError(status, refusal.message, refusal.code, after=refusal.after) from None
    except ConfigError as error:
        raise ApiError(400, str(error), "invalid_value") from None
    return job, events


def _generation(model: Model, routing: str | None, **how: Any) -> Generation:
    """How a model draws with some values replaced; `ApiError` where it cannot."""
    try:
        generation = model.generation.with_(routing=routing, **how)
        if model.bank.router is not None:
            generation.routing.check(model.bank.k, model.bank.pretrain is not None)
            if generation.routing.needs_labels:
                raise ConfigError("routing 'oracle' needs known clusters", "use another strategy")
    except ConfigError as error:
        raise ApiError(400, str(error), "invalid_value", "routing" if routing else None) from None
    return generation


async def _stream(job: Job, events: Events, kind: str, quality: int | None) -> AsyncIterator[bytes]:
    """Server-sent events, as OpenAI's client reads them."""
    left = job.count
    try:
        while left:
            event = await events.get()
            if isinstance(event, Failed):
                yield f"event: error\ndata: {json.dumps(_refusal(event).body)}\n\n".encode()
                return
            width, height = event.image.size
            content = await asyncio.to_thread(_bytes, event.image, kind, quality)
            about: dict[str, Any] = {"quality": "auto", "background": "opaque", "output_format": kind}
            about |= {"b64_json": base64.b64encode(content).decode(), "size": f"{width}x{height}"}
            about["created_at"] = int(time.time())
            if event.index is not None:
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


def _facts(job: Job, event: Drawn) -> dict[str, Any]:
    """What a client is told of a picture: enough to draw it again, and who painted it."""
    how = job.generation
    facts: dict[str, Any] = {"seed": how.seed, "number": event.number, "steps": how.steps}
    if event.routing is not None:
        facts["routing"] = {"strategy": str(how.routing), "steps": event.routing}
    return facts | {"guidance": how.guidance}


def _refusal(event: Failed) -> ApiError:
    status = STATUS.get(event.code, 500)
    return ApiError(status, event.message, event.code, after=None if event.repeats else 5)


def _bytes(image: Image.Image, kind: str, quality: int | None) -> bytes:
    out = io.BytesIO()
    if kind == "png":
        image.save(out, "PNG")
    else:
        image.convert("RGB").save(out, kind.upper(), quality=85 if quality is None else quality)
    return out.getvalue()


def serve(
    source: str, settings: ServeSettings, keys: Sequence[str] = (), trusted: Sequence[str] | None = None
) -> None:
    """Serve every model of a campaign, exported folder or hub name (as `Model.load`) until SIGTERM or SIGINT.

    With `trusted` keys or certificates, one of them must have signed what is loaded.
    """
    app, engine = open_app(source, settings, keys, trusted)

    async def draw(leaving: asyncio.Event) -> None:
        engine.start()
        announced = False
        while not leaving.is_set() and engine.state != FAILED:
            if engine.state == READY and not announced:
                say("ready")
                announced = True
            with suppress(TimeoutError):
                await asyncio.wait_for(leaving.wait(), 0.1)
        if leaving.is_set():
            say("draining" if announced else "left before the models were loaded")
            done = await asyncio.to_thread(engine.drain, settings.drain)
            if announced:
                say("drained" if done else "left with requests unfinished")

    _listen_and_run(app, settings, keys, f"serving {', '.join(engine.names)}", draw)
    if engine.error is not None:
        raise engine.error


def open_app(
    source: str, settings: ServeSettings, keys: Sequence[str] = (), trusted: Sequence[str] | None = None
) -> tuple[FastAPI, Engine]:
    """The application of `serve`, for any ASGI server, and its engine, which is still to be started."""
    options: dict[str, Any] = {"device": own_device(), "trusted": trusted}
    options |= {} if settings.residency is None else {"residency": settings.residency}
    load = partial(load_model, source, **options)
    if is_hub_name(source):
        engine = Engine({ENSEMBLE: load}, settings, Metrics())
        return create_app(engine, settings, keys), engine
    store = Store.open(source)
    names = [ENSEMBLE] if store.exists(MANIFEST) or store.exists(f"{ENSEMBLE}/{MANIFEST}") else []
    names += [name for name in BESIDE if Checkpoint(store, f"{name}/expert").published]
    if not names:
        raise StoreError(f"{source} holds nothing to serve", "name an export, or run 'atoll assemble' first")
    about: dict[str, Any] = {}
    if store.exists(FROZEN):
        campaign = Campaign.open(source)
        about = {"dashboard": Dashboard(campaign), "clusters": of_clusters(store)}
        if store.exists(COMPARISON) and campaign.config.condition == "text":
            about["examples"] = prompts(campaign, 3)
    engine = Engine({name: partial(load, name) for name in names}, settings, Metrics())
    return create_app(engine, settings, keys, **about), engine


def watch(campaign: Campaign, settings: ServeSettings, keys: Sequence[str] = ()) -> None:
    """Show how a campaign stands, as a page, until SIGTERM or SIGINT."""
    app = new_app(Keys(keys, Metrics(), OPEN_PAGES, settings.hosts))
    add_pages(app, False, Dashboard(campaign))
    _listen_and_run(app, settings, keys, "dashboard", asyncio.Event.wait)


def _listen_and_run(
    app: FastAPI,
    settings: ServeSettings,
    keys: Sequence[str],
    title: str,
    work: Callable[[asyncio.Event], Awaitable[object]],
) -> None:
    """Answer until the work is done, which ends soon after its event is set."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    # asyncio sends at once only on sockets that name TCP: on others an answer may wait 40 ms.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # A server that is started again need not wait for connections of the last one to time out.
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((settings.host, settings.port))
        listening.listen(1024)
    except (OSError, UnicodeError) as error:
        listening.close()
        what = f"cannot listen on {settings.host}:{settings.port} ({error})"
        raise ConfigError(what, "take another: --port 8001") from None
    host, port = listening.getsockname()[:2]
    if not ip_address(host).is_loopback and not keys:
        say(f"warning: {host} can be reached from elsewhere, and there is no key: give --keys FILE")
    shown = f"[{host}]" if ":" in host else host

    async def run() -> None:
        config = uvicorn.Config(app, http=_Connection, log_level="warning", access_log=False, lifespan="off")
        server, leaving = _Server(config), asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, leaving.set)
        serving = asyncio.ensure_future(server.serve([listening]))
        say(f"{title} at http://{shown}:{port}")
        await work(leaving)
        server.should_exit = True
        with suppress(TimeoutError):
            await asyncio.wait_for(serving, 10)

    asyncio.run(run())


class _Server(uvicorn.Server):
    # Signals are not for uvicorn, which would end before anything is drained.
    capture_signals = staticmethod(nullcontext)  # type: ignore[assignment]


class _Connection(H11Protocol):
    """Against faults of uvicorn's: it waits for ever for a client; where a body breaks, it answers twice."""

    patience = 30.0  # seconds in which a client sends all of a request, and reads something of its answer

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._look(None)

    def _look(self, before: object) -> None:
        # Half requests and answers that nobody reads: enough of them, and no file is left for other clients.
        now = self.cycle, self.conn.their_state, self.transport.get_write_buffer_size()
        if now == before and (now[2] or now[1] in (h11.IDLE, h11.SEND_BODY)):
            self.transport.abort()
        elif self in self.connections:
            self.loop.call_later(self.patience, self._look, now)

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:  # whose own answer would be the second one
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
