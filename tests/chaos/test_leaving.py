"""Told to leave at any phase: the state is saved within a bound, and the run goes on later."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from chaos.campaigns import SLOWLY, check_as_if_undisturbed, holds, island, kinds
from chaos.test_kills import train_to_the_end
from helpers import entries
from nursery import Nursery, until

pytestmark = pytest.mark.slow
LINGERS = 2.0
BOUND = LINGERS + 5.0
"""Seconds from the first signal to the end: what was under way is finished, and one checkpoint is written."""

MARKER = "begun"
PHASES: dict[str, dict[str, list[Any]]] = {
    "waiting for data": {"linger": ["batch", 60.0, MARKER, 5]},
    "in a step": {"linger": ["step", LINGERS, MARKER, 5]},
    "validating": {"linger": ["validate", LINGERS, MARKER, 1]},
    "drawing a preview": {"linger": ["preview", LINGERS, MARKER, 0]},
    "uploading a checkpoint": {"slow_writes": [r"checkpoints/.*optimizer", LINGERS, MARKER]},
}


@pytest.mark.parametrize("phase", PHASES)
def test_signals_at_every_phase(phase: str, nursery: Nursery, copy: Path, reference: Path) -> None:
    run, marker = island(copy, 0), copy / MARKER
    faults = {
        name: [str(marker) if argument == MARKER else argument for argument in arguments]
        for name, arguments in PHASES[phase].items()
    }
    child = nursery.start(
        "train", "expert", copy, "--expert", "0", "--set", "train.previews=3", faults=faults
    )
    until(marker.exists, child)
    begin = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        child.send(number)
        time.sleep(0.05)
    assert child.wait(BOUND) == 75 and time.monotonic() - begin < BOUND, child.said()
    assert child.errors()[0].startswith("interrupted: expert 0 left at step ")
    last = entries(run)[-1]
    assert (last["kind"], last["reason"]) == ("release", "left")
    assert last["step"] == kinds(run, "commit")[-1]["step"]
    assert f"resumed at step {last['step']} of" in train_to_the_end(nursery, copy, 0).said()
    check_as_if_undisturbed(run, island(reference, 0))


def test_a_storm_of_signals(nursery: Nursery, copy: Path, reference: Path) -> None:
    """From the moment that it holds the run, as fast as they can be sent, until it is gone."""
    run = island(copy, 1)
    for _ in range(3):
        child = nursery.train(copy, 1, faults=SLOWLY)
        until(lambda child=child: holds(run, child.pid), child)
        deadline = time.monotonic() + BOUND
        while child.running() and time.monotonic() < deadline:
            child.send(signal.SIGTERM)
        assert child.code == 75, child.said()
    train_to_the_end(nursery, copy, 1)
    check_as_if_undisturbed(run, island(reference, 1))


def test_data_that_does_not_come(nursery: Nursery, copy: Path, reference: Path) -> None:
    """Told by name; what was done before is kept."""
    run = island(copy, 2)
    faults = {"linger": ["batch", 60.0, str(copy / "begun"), 9]}
    stalled = nursery.start(
        "train", "expert", copy, "--expert", "2", "--set", "train.data_timeout_s=1", faults=faults
    )
    assert stalled.wait(30) == 2
    (line,) = stalled.errors()
    assert "data of the step at sample " in line and "did not come within 1 s" in line
    assert entries(run)[-1]["kind"] == "release" and entries(run)[-1]["reason"] == "failed"
    train_to_the_end(nursery, copy, 2)
    check_as_if_undisturbed(run, island(reference, 2))
