"""SIGKILLs spread over a campaign's stages and their repetition: the same bytes, and nothing left over.

    python tests/chaos/sweep.py --kills 1000 --seed 0

Every round takes a stage at the state that an undisturbed campaign had before it, kills its command at
random moments, again and again, runs it to the end, and holds the folder against the undisturbed one. Of a
training run the log, the heartbeat and what names its holders differ; of these it is asked that they are
whole.
"""

import argparse
import hashlib
import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2] / part) for part in ("", "src", "tests")]

from helpers import metrics, write_campaign
from nursery import Nursery

CHANGES: dict[str, Any] = {
    "monolith": False,
    "budget": {"samples": 480},
    "train": {"checkpoint_every_s": 0.0, "lease": {"heartbeat_seconds": 0.1, "expiry_seconds": 1.0}},
}
STAGES: dict[str, list[str]] = {
    "ingest": ["data", "ingest", "{campaign}"],
    "encode": ["data", "encode", "{campaign}"],
    "partition": ["partition", "{campaign}"],
    "expert 0": ["train", "expert", "{campaign}", "--expert", "0", "--wait"],
    "expert 1": ["train", "expert", "{campaign}", "--expert", "1", "--wait"],
    "router": ["train", "router", "{campaign}", "--wait"],
    "assemble": ["assemble", "{campaign}"],
    "export": ["export", "{campaign}", "--to", "{export}", "--no-picture"],
}
"""Commands; with the places of the campaign and of the export."""
_HELD = re.compile(r".*/run/(log|checkpoints|heartbeat\.json)(/.*)?")
_CHECKPOINT = {"COMMIT.json", "ema.safetensors", "optimizer.safetensors", "weights.safetensors"}


class Sweep:
    """A campaign that was never disturbed, state by state, and the folder in which others are.

    Args:
        folder: an empty folder.
        nursery: forks the processes.
    """

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self.folder, self.nursery = folder, nursery
        self.work = folder / "work"  # of all: paths stand in some files
        write_campaign(self.work / "campaign", CHANGES)
        self.seconds: dict[str, tuple[float, float]] = {}  # of the stage, and of its repetition
        self.states: dict[str, Path] = {}
        self.contents: dict[str, dict[str, str]] = {}
        for stage in STAGES:
            self.states[stage] = Path(shutil.copytree(self.work, folder / "before" / stage))
            self.seconds[stage] = self.finish(stage), self.finish(stage)
            self.contents[stage] = content(self.work)

    def argv(self, stage: str) -> list[str]:
        places = {name: str(self.work / name) for name in ("campaign", "export")}
        return [word.format(**places) for word in STAGES[stage]]

    def finish(self, stage: str) -> float:
        """Run a stage to its end; how long that took."""
        start = time.monotonic()
        child = self.nursery.start(*self.argv(stage))
        assert child.wait() == 0, (stage, child.said())
        child.out.unlink(missing_ok=True)
        self.nursery.children.clear()
        return time.monotonic() - start

    def killed(self, stage: str, seconds: float) -> bool:
        """Start a stage and kill it after so long; whether that is what ended it."""
        child = self.nursery.start(*self.argv(stage))
        moment = time.monotonic() + seconds
        while time.monotonic() < moment and child.running():
            time.sleep(0.005)
        dead = child.kill()
        assert dead or child.code == 0, (stage, child.said())
        child.out.unlink(missing_ok=True)
        return dead

    def round(self, stage: str, chance: random.Random) -> tuple[Counter[str], list[str]]:
        """Kill a stage and its repetitions, and finish it: numbers of kills, and what differs then."""
        shutil.rmtree(self.work)
        shutil.copytree(self.states[stage], self.work)
        kills, done = Counter[str](), False
        for attempt in range(chance.randint(2, 8)):
            dead = self.killed(stage, chance.uniform(0, self.seconds[stage][done]))
            done = done or not dead
            kills["repetition" if attempt else stage] += dead
        self.finish(stage)
        return kills, differences(content(self.work), self.contents[stage])


def content(folder: Path) -> dict[str, str]:
    """Digests of all files but those that tell of holders, which only have to be whole."""
    digests = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_dir() or (_HELD.fullmatch(name) and _is_whole(path)):
            continue
        data = path.read_bytes()
        if path.name == "card.json" and path.parent.name == "expert":
            tree = json.loads(data)
            del tree["provenance"]["seconds"]
            data = json.dumps(tree).encode()
        if path.name == "metrics.jsonl":
            data = json.dumps(metrics(path.parents[1])).encode()
        digests[name] = hashlib.sha256(data).hexdigest()
    return digests


def _is_whole(path: Path) -> bool:
    if path.parent.parent.name == "checkpoints":
        return {file.name for file in path.parent.iterdir()} == _CHECKPOINT
    return path.name == "heartbeat.json" or re.fullmatch(r"\d{6}\.json", path.name) is not None


def differences(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Files that differ, are missing, or are too many."""
    lines = [f"{name}: left over" for name in sorted(one.keys() - other.keys())]
    lines += [f"{name}: missing" for name in sorted(other.keys() - one.keys())]
    return lines + [f"{name}: other bytes" for name in one.keys() & other.keys() if one[name] != other[name]]


def sweep(folder: Path, kills: int, seed: int, seconds: float) -> tuple[Counter[str], list[str], int]:
    """Kills by stage (`repetition`: of a command that was killed before), what differed, and rounds."""
    chance, total, wrong, rounds = random.Random(seed), Counter[str](), list[str](), 0
    deadline = time.monotonic() + seconds
    with Nursery(folder / "said") as processes:
        undisturbed = Sweep(folder, processes)
        while total.total() < kills and time.monotonic() < deadline:
            stage = list(STAGES)[rounds % len(STAGES)]
            counts, differing = undisturbed.round(stage, chance)
            total += counts
            rounds += 1
            wrong += [f"round {rounds}, {stage}: {line}" for line in differing]
            print(f"round {rounds}, {stage}: {total.total()} kills, {len(wrong)} wrong", flush=True)
    return total, wrong, rounds


def main() -> None:
    from benchmarks.harness import finish, row

    parser = argparse.ArgumentParser(description="Kill a campaign's stages at random moments.")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after so long")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    start, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="sweep-"))
    try:
        total, wrong, rounds = sweep(folder, options.kills, options.seed, options.seconds)
    finally:
        with suppress(OSError):
            shutil.rmtree(folder)
    rows = [row(name, "kills", count) for name, count in sorted(total.items())]
    rows.append(row("all", "kills", total.total(), target=(">=", options.kills)))
    rows.append(row("all", "rounds", rounds))
    rows.append(row("all", "files that differ or are left over", len(wrong), target=("<=", 0)))
    rows.append(row("all", "time", time.monotonic() - start, "s"))
    finish("kills", rows, options.json, {"differences": wrong[:100]})
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
