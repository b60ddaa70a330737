"""What can go wrong within a process, put in place before its command runs (see `nursery.py`)."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.store import lease
from atoll.store.store import Store
from atoll.train.tasks import DenoiserTask


def clock(seconds: float) -> None:
    """This machine's clock is wrong by so much."""
    real = time.time
    time.time = lambda: real() + seconds


def store_clock(seconds: float) -> None:
    """The store's clock has jumped ahead: every sign of life looks that much older."""
    real = lease.store_time
    lease.store_time = lambda store: real(store) + seconds


def machine(name: str) -> None:
    """This is another machine: its process ids say nothing here."""
    lease._machine = lambda: name


def die(pattern: str, how: str) -> None:
    """Kill this process at the first change of the store whose key matches.

    Of a write: `before` it, right `after` it, or in its middle: `torn` leaves half of the bytes. Of removals:
    `removing` is before it, `removed` after it.
    """
    put, delete = Store._put, Store.delete

    def key_of(store: Store, key: str) -> str:
        name = store.name(key)
        island = name.partition("/islands/")[2].partition("/")[2]
        return island or name.partition("/campaign/data/")[2] or name.partition("/campaign/student/")[2]

    def gone() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def dying_put(self: Store, key: str, data: bytes | Path | Iterator[bytes], mode: Any) -> None:
        hit = re.fullmatch(pattern, key_of(self, key))
        if hit and how == "before":
            gone()
        if hit and how == "torn":
            whole = data.read_bytes() if isinstance(data, Path) else data
            whole = whole if isinstance(whole, bytes) else b"".join(whole)
            path = self.path(key)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(whole[: len(whole) // 2])
            gone()
        put(self, key, data, mode)
        if hit and how == "after":
            gone()

    def dying_delete(self: Store, *keys: str) -> None:
        for key in keys:
            hit = re.fullmatch(pattern, key_of(self, key))
            if hit and how == "removing":
                gone()
            delete(self, key)
            if hit and how == "removed":
                gone()

    Store._put, Store.delete = dying_put, dying_delete  # type: ignore[method-assign]


def linger(what: str, seconds: float, marker: str = "", count: int = 0) -> None:
    """Make a phase last: `batch`, `step`, `validate` or `preview`; `marker` is made when it begins.

    The first `count` calls are as quick as ever.
    """
    real, calls = getattr(DenoiserTask, what), [0]

    def slow(self: DenoiserTask, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] > count:
            if marker:
                Path(marker).touch()
            time.sleep(seconds)
        return real(self, *args)

    setattr(DenoiserTask, what, slow)


def slow_writes(pattern: str, seconds: float, marker: str) -> None:
    """Every write whose key matches takes so long; `marker` is made when the first begins."""
    put = Store._put

    def slow(self: Store, key: str, data: bytes | Path | Iterator[bytes], mode: Any) -> None:
        if re.search(pattern, self.name(key)):
            Path(marker).touch()
            time.sleep(seconds)
        put(self, key, data, mode)

    Store._put = slow  # type: ignore[method-assign]


def small_files(largest: int, part: int) -> None:
    """Checkpoints of many files, each sent in parts: as of a large network."""
    from atoll.store import ranges
    from atoll.train import state

    state.LARGEST, ranges.PART = largest, part


def watched(root: str, log: str) -> None:
    """Bound this process, and note what hostile input must not cause; see `hostile/watch.py`."""
    from hostile.watch import watched

    watched(root, log)


def call(name: str, *arguments: str) -> None:
    """Run a function of `hostile/calls.py` instead of the command; its errors are told as a command's."""
    from atoll.cli import main as cli
    from hostile import calls

    cli.main = lambda: sys.exit(cli.run_command(lambda: getattr(calls, name)(*arguments)))
