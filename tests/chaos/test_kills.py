"""Processes killed at any moment, wherever they are: the campaign ends as if nothing had happened."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from atoll.store.lease import HELD
from chaos.campaigns import ISLANDS, SLOWLY, check_as_if_undisturbed, files, finished, holds, island, kinds
from nursery import Child, Nursery, until

pytestmark = pytest.mark.slow
DAY = 86_400.0


def train_to_the_end(nursery: Nursery, folder: Path, number: int) -> Child:
    child = nursery.train(folder, number)
    assert child.wait() == 0, child.said()
    return child


def test_three_islands_under_thirty_kills(
    nursery: Nursery, copy: Path, untouched: Path, reference: Path
) -> None:
    """At random moments after a process has taken its run over; clocks of machines and files jump about."""
    chance, kills = random.Random(7), dict.fromkeys(ISLANDS, 0)
    while min(kills.values()) < 10:
        started = []
        for number in ISLANDS:
            faults = {"clock": [chance.uniform(-400, 400) * DAY]}
            if chance.random() < 0.3:  # its successor must rely on its silence
                faults["machine"] = [f"machine {chance.random()}"]
            started.append((number, nursery.train(copy, number, faults=faults)))
        for number, child in started:
            run = island(copy, number)
            until(lambda run=run, child=child: holds(run, child.pid) or finished(run), child)
            if chance.random() < 0.5:
                before = len(kinds(run, "commit"))
                until(lambda run=run, n=before: len(kinds(run, "commit")) > n or finished(run), child)
            time.sleep(chance.uniform(0, 0.06))
            kills[number] += child.kill()
            if finished(run):  # faster than its killers: it is checked, and begins anew
                train_to_the_end(nursery, copy, number)
                check_as_if_undisturbed(run, island(reference, number))
                shutil.rmtree(run)
                shutil.copytree(island(untouched, number), run)
                continue
            for path in chance.choices(sorted((run / "run").rglob("*.json")), k=3):
                when = time.time() - chance.uniform(0, 400) * DAY
                os.utime(path, (when, when))
    for number in ISLANDS:
        train_to_the_end(nursery, copy, number)
        check_as_if_undisturbed(island(copy, number), island(reference, number))


POINTS = [
    (r"run/log/\d+\.json", "after"),
    (r"run/checkpoints/.*/weights\.safetensors", "torn"),
    (r"run/checkpoints/.*/optimizer\.safetensors", "before"),
    (r"run/checkpoints/.*/COMMIT\.json", "torn"),
    (r"run/checkpoints/.*/COMMIT\.json", "after"),
    (r"run/metrics\.jsonl", "after"),
    (r"run/previews/.*", "after"),
    (r"run/export/.*/config\.json", "torn"),
    (r"run/export/.*/.*\.safetensors", "torn"),
    (r"run/export/.*/card\.json", "torn"),
    (r"run/export/.*/card\.json", "after"),
    (r"expert/config\.json", "torn"),
    (r"expert/.*\.safetensors", "torn"),
    (r"expert/card\.json", "before"),
    (r"expert/card\.json", "after"),
    (r"run/export/.*", "removing"),  # all is done then, but for tidying up
    (r"run/export/.*", "removed"),
]
"""Changes of the store at which a process dies, in the order in which a run comes to them."""


def test_killed_at_every_kind_of_write(nursery: Nursery, copy: Path, reference: Path) -> None:
    run = island(copy, 0)
    for pattern, how in POINTS:
        child = nursery.train(copy, 0, faults={"die": [pattern, how]})
        assert child.wait() == -signal.SIGKILL, (pattern, how, child.said())
    assert finished(run) and files(run / "run/export")
    assert "finished already" in train_to_the_end(nursery, copy, 0).said()
    check_as_if_undisturbed(run, island(reference, 0))


def test_of_islands_started_twice_one_trains(nursery: Nursery, copy: Path, reference: Path) -> None:
    """Both at once, over and over; each loser says who holds the run and leaves."""
    run = island(copy, 2)
    for _ in range(2):
        both = [nursery.start("train", "expert", copy, "--expert", "2", faults=SLOWLY) for _ in range(2)]
        until(lambda both=both: any(holds(run, child.pid) for child in both), both[0])
        one, other = both if holds(run, both[0].pid) else both[::-1]
        assert other.wait() == HELD
        assert f"-{one.pid}-" in other.errors()[0] and " holds this run; " in other.errors()[0]
        one.kill()
    train_to_the_end(nursery, copy, 2)
    check_as_if_undisturbed(run, island(reference, 2))


def test_a_holder_that_hangs_is_overtaken_and_publishes_nothing(
    nursery: Nursery, copy: Path, reference: Path
) -> None:
    """It hangs while it writes its export; when it comes to itself the run is over."""
    run = island(copy, 0)
    marker = copy / "writing"
    faults = {"slow_writes": [r"/export/.*safetensors", 1.0, str(marker)], "machine": ["elsewhere"]}
    old = nursery.train(copy, 0, faults=faults)
    until(marker.exists, old)
    old.send(signal.SIGSTOP)
    train_to_the_end(nursery, copy, 0)
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    old.send(signal.SIGCONT)
    assert old.wait() == 2
    (line,) = old.errors()
    assert line.startswith("error: this run was taken over by ")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == after
    check_as_if_undisturbed(run, island(reference, 0))


def test_holders_that_think_each_other_dead(nursery: Nursery, copy: Path, reference: Path) -> None:
    """The store's clock jumps, so that living holders look silent: several train at once, one counts."""
    run, chance = island(copy, 1), random.Random(3)
    for round_ in range(2):
        rivals = []
        for n in range(3):
            faults = {
                **SLOWLY,
                "machine": [f"{round_}-{n}"],
                "store_clock": [3600.0],
                "clock": [chance.uniform(-9, 9) * DAY],
            }
            rivals.append(nursery.train(copy, 1, faults=faults))
            until(lambda c=rivals[-1]: holds(run, c.pid), rivals[-1])
            time.sleep(chance.uniform(0, 0.1))
        for child in rivals[:-1]:
            assert child.wait() == 2 and "this run was taken over by " in child.errors()[0]
        rivals[-1].kill()
    train_to_the_end(nursery, copy, 1)
    check_as_if_undisturbed(run, island(reference, 1))
