"""Who holds a run and whether they still live: heartbeats, their age, and taking over.

Liveness decides only when somebody else may start; that nothing is written twice rests on the log
alone. An age is the difference of two times that the store itself gave, so no machine's clock counts.
"""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from posixpath import join
from typing import Any

from pydantic import Field

from atoll.base.config import Config
from atoll.base.console import say
from atoll.base.errors import StoreError
from atoll.base.format import File
from atoll.store import local
from atoll.store.local import machine as _machine
from atoll.store.local import started as _started
from atoll.store.log import MOST_STEPS, Entry, Fenced, Log, Process
from atoll.store.store import Conflict, Store, check_conditional_create

HEARTBEAT = "heartbeat.json"
HELD = 73
"""Exit code of a run that somebody else holds (EX_CANTCREAT)."""


class LeaseConfig(Config):
    """Heartbeats of a run, and when another process may take it over."""

    heartbeat_seconds: float = Field(default=10.0, gt=0)
    """Seconds between heartbeats; at most a third of `expiry_seconds`."""
    expiry_seconds: float = Field(default=90.0, gt=0)
    """Seconds without a heartbeat after which another process may take over."""


class Heartbeat(File):
    """What a holder says of itself every `train.lease.heartbeat_seconds`. It decides nothing but liveness."""

    FORMAT, PLACE = "atoll/heartbeat", "ROLE/run/heartbeat.json"

    holder: str
    """Who, as in the log."""
    host: str = ""
    """Where."""
    beat: int = 0
    """Number of this beat."""
    time: float = 0.0
    """Seconds since 1970 by that machine's clock; for people only."""
    phase: str = "starting"
    """`starting`, `training`, `validating`, `saving` or `publishing`."""
    step: int | None = Field(default=None, ge=0, le=MOST_STEPS)
    """Optimizer steps done."""
    steps: int | None = None
    """Steps of the whole run."""
    samples: int | None = None
    """Samples consumed."""
    loss: float | None = None
    """The last one."""
    speed: float | None = None
    """Images per second since this start."""
    skipped: int | None = None
    """Steps that the guard left out."""
    committed: int | None = None
    """Step of the last commit."""
    ranks: int | None = None
    """Processes."""


class Held(StoreError):
    """Another living process holds the run."""

    exit_code = HELD


def new_holder() -> str:
    """A name for this process that no other ever had."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


def acquire(
    log: Log,
    lease: LeaseConfig,
    *,
    wait: bool = False,
    pause: Callable[[float], None] = time.sleep,
    **fields: Any,
) -> bool:
    """Become the holder of a run, unless somebody alive holds it (`Held`); False if the run is published.

    With `wait` it waits for the holder to release or fall silent; what `pause` raises ends the waiting.
    """
    # A bucket that ignores If-None-Match would let two processes train one run: find out before, not after.
    check_conditional_create(log.store, "log")
    process = Process(pid=os.getpid(), machine=_machine(), started=_started(os.getpid()))
    announced = ""
    while True:
        log.refresh()
        if log.publication() is not None:
            return False
        holding = log.holding()
        quiet = silence(log.store, holding)
        # Patience is no safety: a holder that only slept (a laptop, a stalled disk) may come back after this.
        # Its next append then collides with our acquire, and it leaves.
        if holding is None or quiet > lease.expiry_seconds:
            try:
                log.acquire(host=socket.gethostname(), process=process, **fields)
                return True
            except Conflict:
                continue  # somebody was faster: look who
        holder = holding[0].holder
        held = f"{holder} holds this run; its last sign of life was {quiet:.0f} s ago"
        if not wait:
            raise Held(held, f"after {lease.expiry_seconds:.0f} s of silence it can be taken over: try then")
        if holder != announced:
            say(f"waiting: {held}")
            announced = holder
        pause(min(2.0, max(0.05, lease.expiry_seconds / 10)))


def silence(store: Store, holding: tuple[Entry, str] | None) -> float:
    """Seconds since the holder of a run (`Log.holding`) gave a sign of life; infinite if none lives."""
    if holding is None or has_ended(holding[0].process):
        return float("inf")
    # Both times are the store's: clocks of two machines may be minutes apart, and a lease is 90 seconds. The
    # clock is asked last: asked first, a beat in between would lie in the future.
    sign = last_sign(store, *holding)
    return max(0.0, store_time(store) - sign)


def last_sign(store: Store, holder: Entry, key: str, folder: str = "") -> float:
    """When a holder last gave a sign of life, by the store's clock."""
    # A heartbeat may be that of the holder before, who was fenced while it wrote: the acquire counts too.
    signs, beat = [store.modified(key)], read_heartbeat(store, folder)
    if beat is not None and beat.holder == holder.holder:
        signs.append(store.modified(join(folder, HEARTBEAT)))
    return max(signs)


def read_heartbeat(store: Store, folder: str = "") -> Heartbeat | None:
    """The last heartbeat of a run, whoever's; None if there is none that can be read."""
    try:
        return Heartbeat.read(store, join(folder, HEARTBEAT))
    except StoreError:
        return None


def store_time(store: Store) -> float:
    """The time by the store's clock: that of a file just written to it, and removed again."""
    if store.local is not None:
        try:
            return local.now(store.local)
        except OSError as error:
            fix = "check its permissions"
            raise StoreError(f"cannot write to {store.location}: {error.strerror}", fix) from None
    key = f"clock-{uuid.uuid4().hex}"
    store.put(key, b"")
    try:
        return store.modified(key)
    finally:
        store.delete(key)


def has_ended(known: Process | None) -> bool:
    """Whether a process of this machine is gone for sure; False where that cannot be known."""
    if known is None or not known.machine or known.machine != _machine():
        return False
    # Process numbers are used again; with the time of the start they are not.
    return _started(known.pid) != known.started


class Heart:
    """A thread that writes `heartbeat.json` until it is stopped or the run is taken over."""

    def __init__(self, log: Log, lease: LeaseConfig, read: Callable[[], dict[str, Any]]) -> None:
        self.log, self.lease, self.read = log, lease, read
        self.fenced: Fenced | None = None
        self._stop = threading.Event()
        # A thread, since a step may take longer than a lease; a daemon, since a run that fails must end.
        self._thread = threading.Thread(target=self._run, daemon=True, name="heartbeat")

    def __enter__(self) -> "Heart":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def check(self) -> None:
        """`Fenced` if the run was found to be taken over."""
        if self.fenced is not None:
            raise self.fenced

    def _run(self) -> None:
        beats = 0
        while True:
            try:
                # First the log: a holder that was fenced must not overwrite its successor's sign of life.
                self.log.check()
                beats += 1
                host, now = socket.gethostname(), round(time.time(), 3)
                beat = Heartbeat(holder=self.log.holder, host=host, beat=beats, time=now, **self.read())
                self.log.store.put_json(HEARTBEAT, beat.to_json())
            except Fenced as error:
                self.fenced = error
                return
            except Exception as error:  # the next beat may come through; the log guards what counts
                if beats <= 1:
                    say(f"warning: no heartbeat: {error}")
            if self._stop.wait(min(self.lease.heartbeat_seconds, self.lease.expiry_seconds / 3)):
                return
