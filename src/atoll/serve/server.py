"""`atoll serve` and `atoll dashboard`: a folder behind HTTP, until they are told to leave."""

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import ConfigError, StoreError
from atoll.campaign.card_facts import COMPARISON, prompts
from atoll.campaign.folder import FROZEN, Campaign
from atoll.campaign.report_table import of_clusters
from atoll.campaign.roles import BESIDE
from atoll.model.checkpoint import Checkpoint
from atoll.model.folder import MANIFEST
from atoll.model.model import ENSEMBLE, Model
from atoll.model.opened import is_hub_name
from atoll.report.dashboard import Dashboard
from atoll.serve.app import create_app
from atoll.serve.engine import FAILED, READY, Engine
from atoll.serve.guard import Keys, new_app
from atoll.serve.metrics import Metrics
from atoll.serve.pages import OPEN_PAGES, add_pages
from atoll.serve.settings import ServeSettings
from atoll.store.store import Store


def serve(
    source: str, settings: ServeSettings, keys: Sequence[str] = (), trusted: Sequence[str] | None = None
) -> None:
    """Serve every model of a campaign, or of an exported folder or hub name, until SIGTERM or SIGINT.

    Args:
        source: what `Model.load` takes.
        keys: bearer keys; none lets everybody in.
        trusted: public keys, one of which must have signed what is loaded.

    Raises:
        StoreError: there is nothing to serve, or a file is not what the manifest says.
        ConfigError: the address is taken or is none.
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
    load = partial(Model.load, residency=settings.residency, device=own_device(), trusted=trusted)
    if is_hub_name(source):
        engine = Engine({ENSEMBLE: partial(load, source)}, settings, Metrics())
        return create_app(engine, settings, keys), engine
    store = Store.open(source)
    names = [ENSEMBLE] if store.exists(MANIFEST) or store.exists(f"{ENSEMBLE}/{MANIFEST}") else []
    names += [name for name in BESIDE if Checkpoint(store, f"{name}/expert").published]
    if not names:
        raise StoreError(f"{source} holds nothing to serve", f"assemble it: atoll assemble {source}")
    about: dict[str, Any] = {}
    if store.exists(FROZEN):
        campaign = Campaign.open(source)
        about = {"dashboard": Dashboard(campaign), "clusters": of_clusters(store)}
        if store.exists(COMPARISON) and campaign.config.condition == "text":
            about["examples"] = prompts(campaign, 3)
        # A comparison side by side is fair only if all models draw with the same steps and guidance.
        load = partial(load, generation=campaign.config.sampling, encoders=campaign.config.encoders)
    engine = Engine({name: partial(load, store, name) for name in names}, settings, Metrics())
    return create_app(engine, settings, keys, **about), engine


def watch(campaign: Campaign, settings: ServeSettings, keys: Sequence[str] = ()) -> None:
    """Show how a campaign stands, as a page, until SIGTERM or SIGINT."""
    app = new_app(Keys(keys, Metrics(), OPEN_PAGES))
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
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals are not for uvicorn, which would end before anything is drained.
        yield


class _Connection(H11Protocol):
    """Against two faults of uvicorn's: where a body breaks, it answers a second time, and raises."""

    def send_400_response(self, msg: str) -> None:
        if self.cycle is not None:  # whose own answer would be the second one
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()
