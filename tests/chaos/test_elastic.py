"""One run on 2 processes, then 1, then 4: the same samples with the same draws, and nearly the same sums."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from chaos.campaigns import finished, island, kinds
from helpers import Answer, entries, environment, metrics, newest_checkpoint, partitioned

pytestmark = pytest.mark.slow
RECORDING = Path(__file__).with_name("recording.py")
BATCH = 16
TOLERANCE = 1e-4
"""Of weights after thirty steps of AdamW, whose first divide by small numbers: sums in another order."""
TRAIN: dict[str, Any] = {"batch": BATCH, "checkpoint_every_s": 0.0, "log_every": 1, "previews": 1}
TRAIN |= {"lease": {"heartbeat_seconds": 0.1, "expiry_seconds": 1.0}}
TRAIN |= {"parallel": {"collective_timeout_s": 60.0}}
CHANGES: dict[str, Any] = {"budget": {"samples": 960}, "monolith": False, "train": TRAIN}
CHANGES |= {"network": {"depth": 2}}  # FSDP leaves the first block alone


@dataclass
class Ranks:
    """A run that `torchrun` spreads over processes."""

    process: subprocess.Popen[str]
    name: str

    def end(self, seconds: float = 200) -> Answer:
        out, err = self.process.communicate(timeout=seconds)
        print(out, err)  # an assertion would cut them
        return Answer(self.process.returncode, out, err)

    def workers(self) -> list[int]:
        """Process ids of the ranks: children of the launcher, each a session of its own."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid and fields[0] != "Z":
                found.append(int(path.parent.name))
        return sorted(found)

    def kill(self) -> None:
        """The whole machine at once."""
        for pid in [self.process.pid, *self.workers()]:
            os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=60)


@contextmanager
def ranks(
    folder: Path, count: int, name: str, record: Path, *sets: str, launcher: str = "torch.distributed.run"
) -> Iterator[Ranks]:
    """Train expert 0 with so many processes; whatever still runs at the end is killed."""
    record.mkdir(exist_ok=True)
    argv = [str(RECORDING), "train", "expert", str(folder), "--expert", "0", "--wait"]
    argv += [part for change in sets for part in ("--set", change)]
    if count > 1:
        argv = ["-m", launcher, "--standalone", "--nproc-per-node", str(count), *argv]
    env = {**environment(), "ATOLL_RECORD": str(record), "ATOLL_NAME": name}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen([sys.executable, *argv], env=env, text=True, **pipes)
    made = Ranks(process, name)
    try:
        yield made
    finally:
        if process.poll() is None:
            made.kill()


def reached(run: Path, step: int) -> Callable[[], bool]:
    """Whether a step is committed."""
    return lambda: any(entry["step"] >= step for entry in kinds(run, "commit"))


def until(what: Callable[[], bool], spread: Ranks, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        if spread.process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(spread.process.communicate(timeout=10))
        time.sleep(0.01)


Record = dict[int, str]


def drawn(record: Path, name: str, whole_steps: int) -> Record:
    """Hash of each position that an attempt trained on; each step's positions exactly once.

    Args:
        record: folder of the lines.
        name: of the attempt.
        whole_steps: at least so many of its steps were complete; the last may have been cut short.
    """
    seen: dict[int, list[str]] = {}
    for path in record.glob(f"{name}-*.jsonl"):
        for text in path.read_text().splitlines(keepends=True):
            if text.endswith("\n"):  # the last line of a process that was killed may be half a line
                line = json.loads(text)
                for number, value in enumerate(line["hashes"]):
                    seen.setdefault(line["first"] + number, []).append(value)
    steps = sorted({position // BATCH for position in seen})
    assert steps == list(range(steps[0], steps[-1] + 1)) and len(steps) > whole_steps
    for step in steps[: -2 if whole_steps < len(steps) - 1 else None]:
        assert all(len(seen.get(p, [])) == 1 for p in range(step * BATCH, (step + 1) * BATCH)), step
    return {position: values[0] for position, values in seen.items()}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic") / "campaign"
    partitioned(folder, CHANGES)
    return folder


@pytest.fixture(scope="module")
def alone(untouched: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Record]:
    """The run on one process, and what it drew."""
    folder = Path(shutil.copytree(untouched, tmp_path_factory.mktemp("alone") / "campaign"))
    record = folder.parent / "record"
    with ranks(folder, 1, "alone", record) as spread:
        assert spread.end().code == 0
    lines = drawn(record, "alone", 1)
    assert len(lines) % BATCH == 0 and len(lines) > 20 * BATCH
    return folder, lines


def furthest(one: Path, other: Path, file: str) -> float:
    """Largest difference of any number in a file of the last checkpoints."""
    first, second = (load_file(newest_checkpoint(run) / file) for run in (one, other))
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def check_close(run: Path, reference: Path) -> None:
    """Weights, their average and the losses are those of one process, but for the order of sums."""
    assert finished(run) and len(kinds(run, "publish")) == 1
    gaps = {file: furthest(run, reference, f"{file}.safetensors") for file in ("weights", "ema")}
    print(f"furthest from one process: {gaps}")
    assert all(gap < TOLERANCE for gap in gaps.values()), gaps
    lines, others = metrics(run), metrics(reference)
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for line, other in zip(lines, others, strict=True):
        for key in ("loss", "validation_loss"):
            assert (key in line) == (key in other) and line.get(key, 0) == pytest.approx(
                other.get(key, 0), rel=1e-4
            )


def test_two_killed_one_killed_four(copy: Path, alone: tuple[Path, Record], tmp_path: Path) -> None:
    run, record, (reference, expected) = island(copy, 0), tmp_path / "record", alone
    with ranks(copy, 2, "two", record) as spread:
        until(reached(run, 6), spread)
        spread.kill()
    with ranks(copy, 1, "one", record) as spread:
        until(reached(run, 14), spread)
        spread.kill()
    with ranks(copy, 4, "four", record, "train.parallel.micro_batch=2") as spread:
        answer = spread.end()
    assert answer.code == 0 and answer.out.count("resumed at step") == 1, answer
    drawings = [drawn(record, name, 4) for name in ("two", "one", "four")]
    for lines in drawings:
        assert lines.items() <= expected.items()
    assert set().union(*drawings) == set(expected)
    assert [entry["ranks"] for entry in kinds(run, "acquire")] == [2, 1, 4]
    check_close(run, island(reference, 0))


FSDP = ['train.parallel.strategy="fsdp"', "train.parallel.shard=2"]
WAYS = {
    "compiled": (2, ["train.parallel.compile=true"]),
    "fsdp, all of it": (4, [*FSDP, "train.parallel.checkpointing=true", "train.parallel.micro_batch=3"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_other_ways_to_spread_a_step(
    way: str, copy: Path, alone: tuple[Path, Record], tmp_path: Path
) -> None:
    if way == "compiled" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++ on a CPU")
    count, sets = WAYS[way]
    with ranks(copy, count, "all", tmp_path / "record", *sets) as spread:
        answer = spread.end()
    assert answer.code == 0, answer
    assert drawn(tmp_path / "record", "all", 20) == alone[1]
    check_close(island(copy, 0), island(alone[0], 0))


def test_all_ranks_leave_together_and_sharded_weights_resume_on_one(
    copy: Path, alone: tuple[Path, Record], tmp_path: Path
) -> None:
    run, fsdp = island(copy, 0), 'train.parallel.strategy="fsdp"'
    with ranks(copy, 2, "two", tmp_path / "record", fsdp, launcher="atoll.launch.torchrun") as spread:
        until(reached(run, 6), spread)
        begin = time.monotonic()
        spread.process.send_signal(signal.SIGTERM)
        answer = spread.end(60)
    assert answer.code == 75 and time.monotonic() - begin < 30, answer
    (left,) = kinds(run, "release")
    assert left["reason"] == "left" and left["step"] == kinds(run, "commit")[-1]["step"]
    with ranks(copy, 1, "one", tmp_path / "record") as spread:
        answer = spread.end()
    assert answer.code == 0 and f"resumed at step {left['step']} of" in answer.out
    check_close(run, island(alone[0], 0))


def test_a_rank_that_hangs_is_named(copy: Path, tmp_path: Path) -> None:
    run = island(copy, 0)
    hurry = "train.parallel.collective_timeout_s=4.0"
    with ranks(copy, 2, "two", tmp_path / "record", hurry, launcher="atoll.launch.torchrun") as spread:
        until(reached(run, 4), spread)
        (holder,) = [entry["process"]["pid"] for entry in kinds(run, "acquire")]
        (other,) = [pid for pid in spread.workers() if pid != holder]
        os.kill(other, signal.SIGSTOP)
        answer = spread.end(120)
    assert answer.code == 1, answer  # nobody's mistake: a job is queued again
    errors = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and " did not finish " in errors[0] and "another process of this run" in errors[0]
    assert "Traceback" not in answer.err, answer.err
    assert entries(run)[-1]["kind"] == "release" and not finished(run)


def test_a_rank_whose_data_do_not_come_says_so(copy: Path, tmp_path: Path) -> None:
    """The others only see that a collective fails; the one line is that of the rank that knows why."""
    sets = ("train.data_timeout_s=2", "train.parallel.collective_timeout_s=60")
    with ranks(copy, 2, "stalls-1", tmp_path / "record", *sets, launcher="atoll.launch.torchrun") as spread:
        answer = spread.end(120)
    errors = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert answer.code == 2 and "did not come within 2 s" in errors[0], answer.err
    assert entries(island(copy, 0))[-1]["kind"] == "release"
