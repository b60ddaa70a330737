"""Bytes that change behind a run's back: what is damaged is noticed, named and done without."""

import random
import re
from pathlib import Path

import pytest

from atoll.store.local import sweep
from chaos.campaigns import SLOWLY, check_as_if_undisturbed, island, kinds
from chaos.test_kills import train_to_the_end
from helpers import newest_checkpoint
from nursery import Nursery, until

pytestmark = pytest.mark.slow
PARTS = ("weights.safetensors", "ema.safetensors", "optimizer.safetensors", "COMMIT.json")


def flip(path: Path, chance: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(data))


def cut(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def killed_after_two_commits(nursery: Nursery, folder: Path, number: int) -> str:
    """What a training said that died then."""
    run, child = island(folder, number), nursery.train(folder, number, faults=SLOWLY)
    wanted = len(kinds(run, "commit")) + 2
    until(lambda: len(kinds(run, "commit")) >= wanted, child)
    assert child.kill()
    return child.said()


def test_every_file_of_a_checkpoint(nursery: Nursery, copy: Path, reference: Path) -> None:
    run, chance = island(copy, 0), random.Random(11)
    killed_after_two_commits(nursery, copy, 0)
    for number, part in enumerate(PARTS):
        newest = newest_checkpoint(run)
        (flip, cut)[number % 2](newest / part, chance)
        said = killed_after_two_commits(nursery, copy, 0)
        assert (
            "checkpoint set aside: " in said
            and f"checkpoints/{newest.name}/{part}" in said
            and "resumed at step" in said
        ), said
        assert len(kinds(run, "set_aside")) == number + 1
    train_to_the_end(nursery, copy, 0)
    check_as_if_undisturbed(run, island(reference, 0))


def test_all_checkpoints_at_once(nursery: Nursery, copy: Path, reference: Path) -> None:
    """Nothing whole is left: it begins anew, and comes to the same."""
    run, chance = island(copy, 1), random.Random(12)
    killed_after_two_commits(nursery, copy, 1)
    for path in (run / "run/checkpoints").rglob("*.safetensors"):
        cut(path, chance)
    said = train_to_the_end(nursery, copy, 1).said()
    assert said.count("checkpoint set aside") == 2 and "resumed" not in said
    check_as_if_undisturbed(run, island(reference, 1))


def test_entries_of_the_log(nursery: Nursery, copy: Path, reference: Path) -> None:
    """Of each kind one: an entry that cannot be read says nothing, and nobody's rights are lost by it."""
    run, chance = island(copy, 2), random.Random(13)
    killed_after_two_commits(nursery, copy, 2)
    killed_after_two_commits(nursery, copy, 2)
    for kind in ("acquire", "commit", "resume"):
        entries = sorted((run / "run/log").glob("*.json"))
        path = [path for path in entries if f'"kind": "{kind}"' in path.read_text()][-1]
        (flip if chance.random() < 0.5 else cut)(path, chance)
        assert f"warning: log/{path.name} is damaged" in killed_after_two_commits(nursery, copy, 2)
    train_to_the_end(nursery, copy, 2)
    check_as_if_undisturbed(run, island(reference, 2))


def test_a_shard_of_the_data(nursery: Nursery, copy: Path, reference: Path) -> None:
    """Refused in one line before the first step; put back, the run goes on where it was."""
    run, chance = island(copy, 0), random.Random(14)
    killed_after_two_commits(nursery, copy, 0)
    sweep(run / "run")  # of what the killed trainer was writing, as the next one would do
    before = {path: path.read_bytes() for path in (run / "run").rglob("*") if path.is_file()}
    shards = sorted((run / "data").rglob("*.safetensors")) + sorted((run / "data/rows").glob("*.parquet"))
    assert len(shards) > 2
    for shard, harm in ((shards[0], flip), (shards[-1], cut)):
        whole = shard.read_bytes()
        harm(shard, chance)
        child = nursery.train(copy, 0)
        assert child.wait() == 2, child.said()
        (line,) = child.errors()
        assert shard.name in line and re.search(r"torn|damaged|SHA-256", line), line
        shard.write_bytes(whole)
    assert before.items() <= {p: p.read_bytes() for p in (run / "run").rglob("*") if p.is_file()}.items()
    assert "resumed at step" in train_to_the_end(nursery, copy, 0).said()
    check_as_if_undisturbed(run, island(reference, 0))
