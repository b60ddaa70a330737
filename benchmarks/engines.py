"""The engines on the same work: seconds of the data stages and of drawing, and what an engine costs a shard.

    python examples/icons/prepare.py iconify-json-2.2.535.tgz icons64 [--sets ...]
    python benchmarks/engines.py --source icons64 [--model CAMPAIGN] [--only pool ray] [--json PATH]
    python benchmarks/engines.py --islands 100
    python benchmarks/engines.py --quick

Serial is one process, the pool two; Slurm and Ray are started here, two nodes of a core each, and this
program and all that it starts is bound to two cores. Every engine ingests, embeds and encodes in a folder of
its own, by the command that a user types, and must end with the bytes of the serial run. Its overhead is what
two cores spent beyond the serial run, a shard; a queue's waiting counts. Then every engine draws the same
images of one campaign (`atoll evaluate`).

`--islands K` trains K tiny experts, a router and nothing else as jobs of Ray, and kills the process of every
tenth expert, by SIGKILL, at a moment that a seed draws. All have to end with the bits of experts that nobody
killed, which are trained in turn, here. A job's overhead is what two cores spent while no process of it ran.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest.mock import patch

from harness import ROOT, Row, finish, flags, measured, new, parsed, parser, row, run_command, train

from atoll.campaign.folder import Campaign
from atoll.campaign.runs import runs_of
from atoll.train.run import train_run

sys.path.append(str(ROOT / "tests"))
from launch import cluster
from launch.ray_nodes import QUIET, nodes

WORKERS = 2
"""Processes, tasks and nodes."""
STAGES = ("ingest", "embed", "encode")
ENGINES = {
    "serial": (),
    "pool": ("--workers", str(WORKERS)),
    "slurm": ("--workers", str(WORKERS), "--on", "slurm"),
    "ray": ("--workers", str(WORKERS), "--on", "ray"),
}
SETTINGS = ("data.ingest.id=id", "data.ingest.licence_column=licence", "student=null")
ON_SLURM = "launch.slurm.partition=both"
SMALL = (
    "condition=class",
    "data.ingest={size: 8, mode: gray, heldout: 0.1, label: null, glyphs: {characters: basic}}",
    "data.ingest.shard_rows=128",
    "network={family: dit, size: nano, patch: 4, depth: 1, heads: 2, head_width: 16}",
    "router={patch: 4, depth: 1, heads: 1, head_width: 16, share: 0.1}",
    "train={batch: 16, lr: 1.0e-3, validations: 0, previews: 0, checkpoint_every_s: 0.5}",
    "monolith=false",
)
"""Settings of campaigns whose runs take seconds."""


def main() -> None:
    """Measure the engines that `--only` asks for, or the islands."""
    words = parser(__doc__, "glyphs of 8 px and 48 images, of which the times mean nothing", "engines")
    words.add_argument("--source", type=Path, help="folder of parquet files that prepare.py wrote")
    words.add_argument("--model", type=Path, help="campaign to draw from; else a tiny one is trained")
    words.add_argument("--samples", type=int, default=2000, help="images that are drawn; 0 for none")
    words.add_argument("--islands", type=int, metavar="K", help="train K islands on Ray instead")
    options = parsed(words)
    if not (options.quick or options.source or options.islands):
        options.error("give --source FOLDER, --islands K or --quick")
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        if hasattr(os, "sched_setaffinity"):
            cores = os.sched_getaffinity(0)
            os.sched_setaffinity(0, sorted(cores)[:WORKERS])
            stack.callback(os.sched_setaffinity, 0, cores)
        folder = Path(scratch)
        if options.islands:
            stack.enter_context(ray_nodes())
            finish("islands", [*islands(folder, options.islands)], options)
            return
        for name, start in (("slurm", partial(slurm_nodes, folder / "slurm")), ("ray", ray_nodes)):
            if not options.only or name in options.only:
                stack.enter_context(start())
        recipe, sets = "quickstart", SMALL
        if options.source:
            recipe, sets = "emoji", (*SETTINGS, f"data.source={options.source.resolve()}")
        samples = min(options.samples, 48) if options.quick else options.samples
        if (model := options.model) is None and samples:
            model = new(folder / "model", "quickstart", [*SMALL, "budget.samples=2000"], alone=False)
            train(model, alone=False)
        work = Work(folder, recipe, sets, model, samples)
        # The serial run and the pool are what the others are measured by.
        options.only = options.only and ["serial", "pool", *options.only]
        finish("engines", measured(options, {name: partial(work.by, name) for name in ENGINES}), options)


@dataclass
class Work:
    """What every engine does in a folder of its own, and the seconds that each has taken."""

    folder: Path
    recipe: str
    sets: Sequence[str]
    model: Path | None
    samples: int
    spent: dict[tuple[str, str], float] = field(default_factory=dict)
    """By stage and engine."""

    def by(self, name: str) -> Iterator[Row]:
        """Seconds of all stages with one engine, its overhead, and ratios to the pool's."""
        made = new(self.folder / name, self.recipe, [*self.sets, ON_SLURM])
        work: dict[str, Sequence[str | Path]] = {stage: ("data", stage, made) for stage in STAGES}
        if self.samples and self.model:
            drawing = self.folder / f"{name}-model"
            shutil.copytree(self.model, drawing, symlinks=True)
            samples = ("--samples", str(self.samples))
            work["draw"] = ("evaluate", drawing, *samples, *flags([ON_SLURM] * (name == "slurm")))
        shards = 0
        for stage, words in work.items():
            begun = time.monotonic()
            run_command(*words, *ENGINES[name])
            while name == "slurm" and queued():
                time.sleep(0.1)
            seconds = self.spent[stage, name] = time.monotonic() - begun
            yield row(name, f"{stage}: seconds", seconds, "s")
            if stage == "ingest":
                shards = len(Campaign.open(made).dataset().manifest.shards)
                yield row(name, "shards", shards)
            # Images are drawn in parts of a size that data shards do not have.
            if name != "serial" and stage in STAGES:
                beyond = WORKERS * seconds - self.spent[stage, "serial"]
                yield row(name, f"{stage}: overhead a shard", 1000 * beyond / shards, "ms")
        totals = {who: sum(self.spent.get((stage, who), 0.0) for stage in work) for who in ("pool", name)}
        yield row(name, "all stages: seconds", totals[name], "s")
        if name in ("slurm", "ray"):
            for stage in work:
                ratio = self.spent[stage, name] / self.spent[stage, "pool"]
                yield row(name, f"{stage}: seconds / pool's", ratio)
            ratio = totals[name] / totals["pool"]
            yield row(name, "all stages: seconds / pool's", ratio, target=("<=", 1.05))
        if (mine := contents(made)) != (serial := contents(self.folder / "serial")):
            files = sorted(path for path in {*mine, *serial} if mine.get(path) != serial.get(path))
            raise SystemExit(f"{name} made other data than the serial run: {', '.join(files)}")


def contents(campaign: Path) -> dict[str, str]:
    """What describes a data set by sizes and hashes: its manifest, and that of every column."""
    data = Campaign.open(campaign).data_store().path("")
    pages = [data / "manifest.json", *sorted(data.glob("columns/*/column.json"))]
    return {str(page.relative_to(data)): page.read_text() for page in pages}


# Clusters of two nodes, on this machine.


@contextmanager
def slurm_nodes(folder: Path) -> Iterator[None]:
    """A Slurm of two nodes, found by its commands; leaves where there can be none."""
    if reason := cluster.why_not():
        raise SystemExit(f"no Slurm: {reason}; leave it out with --only pool ray")
    with cluster.slurm(folder) as variables, patch.dict(os.environ, variables):
        yield


@contextmanager
def ray_nodes() -> Iterator[None]:
    """A Ray cluster of two nodes, found by its address."""
    with ExitStack() as stack:
        address, _ = stack.enter_context(nodes(*[1] * WORKERS, environment=os.environ))
        stack.enter_context(patch.dict(os.environ, {**QUIET, "RAY_ADDRESS": address}))
        yield


def queued() -> bool:
    """Whether Slurm has any job, waiting or running."""
    done = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True)
    return bool(done.stdout.strip())


# Many islands, some of which are killed.


def islands(folder: Path, count: int, seed: int = 0) -> Iterator[Row]:
    """Experts as jobs of Ray, a tenth of them killed: what it took, and that nothing is lost."""
    cut = ["partition.method=random", f"partition.k={count}"]
    sets = [*SMALL, *cut, f"budget.samples={count * 6400}"]
    made = new(folder / "islands", "quickstart", sets, alone=False)
    for words in (("data", "prepare", made), ("partition", made)):
        run_command(*words, alone=False)
    shutil.copytree(made, folder / "undisturbed")
    draws = random.Random(seed)
    victims = {k: draws.random() / 2 for k in draws.sample(range(count), max(1, count // 10))}
    watch = Watch(made, victims)
    begun = time.monotonic()
    with watch:
        run_command("launch", made, "--on", "ray")
    seconds = time.monotonic() - begun
    campaign, lost = Campaign.open(made), 0
    for run in runs_of(campaign.config):
        lost += not run.published(campaign.store)
    undisturbed = Campaign.open(folder / "undisturbed")
    for k in range(count):
        train_run(undisturbed, "expert", k)
    same = sum(weights(made, k) == weights(folder / "undisturbed", k) for k in range(count))
    jobs, killed = len(watch.lives), len(watch.killed)
    yield row("islands", "experts", count)
    yield row("islands", "killed", killed, target=(">=", len(victims)))
    yield row("islands", "processes of training", jobs)
    yield row("islands", "runs that did not end", lost, target=("<=", 0))
    yield row("islands", "experts with the bits of undisturbed ones", same, target=(">=", count))
    yield row("islands", "seconds", seconds, "s")
    yield row("islands", "overhead a process", (WORKERS * seconds - watch.seconds()) / jobs, "s")


def weights(campaign: Path, k: int) -> bytes:
    """The file of an expert's network."""
    return (campaign / f"islands/{k}/expert/diffusion_pytorch_model.safetensors").read_bytes()


class Watch:
    """Sees the training processes of a campaign come and go, by Linux's account, and kills some.

    Args:
        victims: experts, and how many seconds after it took its island the process of each is killed.
    """

    def __init__(self, campaign: Path, victims: Mapping[int, float]) -> None:
        self.campaign, self.victims = campaign, dict(victims)
        self.lives: dict[int, list[float]] = {}  # of a process: first and last seen
        self.killed: list[int] = []
        self._due: dict[int, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def seconds(self) -> float:
        """Of all processes together."""
        return sum(last - first for first, last in self.lives.values())

    def _look(self) -> None:
        while not self._ended.wait(0.05):
            for folder in Path("/proc").glob("[0-9]*"):
                try:
                    argv = (folder / "cmdline").read_text().split("\0")
                except OSError:  # it has gone
                    continue
                if argv[1:4] != ["-m", "atoll", "train"] or str(self.campaign) not in argv:
                    continue
                process, now = int(folder.name), time.monotonic()
                self.lives.setdefault(process, [now, now])[1] = now
                if "--expert" in argv:
                    self._kill(int(argv[argv.index("--expert") + 1]), process, now)

    def _kill(self, k: int, process: int, now: float) -> None:
        if k not in self.victims or not (self.campaign / f"islands/{k}/run/log").exists():
            return
        if now >= self._due.setdefault(k, now + self.victims[k]):
            os.kill(process, signal.SIGKILL)
            self.killed.append(k)
            del self.victims[k]


if __name__ == "__main__":
    main()
