"""Leaving in the middle of a run, within this process."""

import signal
from collections.abc import Callable

import pytest

from atoll.train.state import Guard


@pytest.fixture
def told_to_leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the next run in this process get SIGTERM in its nth step, once."""

    def arrange(step: int) -> None:
        admits, seen = Guard.admits, []

        def signalling(guard: Guard, loss: float, norm: float) -> bool:
            seen.append(loss)
            if len(seen) == step:
                signal.raise_signal(signal.SIGTERM)
            return admits(guard, loss, norm)

        monkeypatch.setattr(Guard, "admits", signalling)

    return arrange
