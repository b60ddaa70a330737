"""SIGTERM, SIGINT and SIGHUP are noted, not obeyed at once: the loop saves and leaves between two steps.

Periodic commits are the guarantee, since a kill gives no warning; this saves what came after the last one.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from atoll.base.errors import INTERRUPTED, AtollError

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_process = {"ends": False}
_leaked: list[threading.Thread] = []


class Interrupted(AtollError):
    """The run was told to leave; its state is saved."""

    exit_code = INTERRUPTED


def ends_with_run() -> None:
    """Say that nothing comes after this run: once told to leave, the process hears no signal any more."""
    # One that comes while Python takes itself down would change the exit code.
    _process["ends"] = True


@contextmanager
def catch_signals(heard: tuple[signal.Signals, ...] = SIGNALS) -> Iterator[list[int]]:
    """Signals that came so far; more of them change nothing."""
    # A list, because a handler may interrupt any line of Python: to append is one operation, and nothing
    # else is safe there. An exception raised here could hit the optimizer between two weights.
    stop_requested: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        stop_requested.append(number)

    # In other threads Python sets none: there a run goes to its end.
    main = threading.current_thread() is threading.main_thread()
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # asks that the last of them change nothing
    before = {s: signal.signal(s, note) for s in heard if main and (s != signal.SIGHUP or not nohup)}
    try:
        yield stop_requested
    finally:
        # Schedulers send TERM again and again. Once the run is over a late one must not turn "saved, go on
        # later" into "died of a signal"; where the process has other work, handlers are put back.
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if stop_requested and _process["ends"] else handler)


def leak_thread(thread: threading.Thread) -> None:
    """Wait no longer for a daemon thread that does not end; `exit_process` will know of it."""
    _leaked.append(thread)


def exit_process(code: int) -> NoReturn:
    """End this process with a code."""
    # Python cannot be taken down below threads that may come back into it: the process would abort, with the
    # code of that. Such are a leaked thread that still works, and where there are several processes the
    # threads in which gloo gives tensors back.
    orderly = int(os.environ.get("WORLD_SIZE", "1")) == 1 and not any(thread.is_alive() for thread in _leaked)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it any more, or its disk is full: Python would end with 120
            orderly = False
    if orderly:
        sys.exit(code)
    os._exit(code)
