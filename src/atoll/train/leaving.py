"""SIGTERM and SIGINT are noted, not obeyed at once: the loop saves and leaves between two steps."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from atoll.base.errors import AtollError

INTERRUPTED = 75
"""Exit code of a run that was told to leave, saved its state and can be resumed (EX_TEMPFAIL)."""


class Interrupted(AtollError):
    """The run was told to leave; its state is saved."""

    exit_code = INTERRUPTED


@contextmanager
def leaving() -> Iterator[list[int]]:
    """Signals that came so far; more of them change nothing."""
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        told.append(number)

    before = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
