"""Time per step of Atoll's training loop against a bare PyTorch loop: same network, batch and optimizer.

    python benchmarks/training.py [--quick] [--pairs N] [--json PATH]

The whole loop is `atoll.train.loop.train` as `atoll train` calls it: rows from a data set on disk, noise
and times per sample, gradient clipping, guard, weight average, metrics, heartbeat, and a checkpoint every
100 timed steps (counted in the run's log). The bare loop is forward, loss, backward and a fused AdamW step on
batches that lie in memory. Both are one process with the same number of threads on the same cores, and take
turns of 100 steps; every turn of the whole loop resumes the run where the last one left it. A ratio is the
median over the pairs of turns. Processor time counts all threads, so it tells the whole loop's work also
where other programs run beside it.

Cores decide who pays for the data, which a thread prepares while a step runs: on one core that comes on top
of the step; on two it does not, unless the step itself uses both. So the CPU is measured three ways (quick:
the first two). Validations and previews are left out: they are asked for by number, not per step. On a CPU
that multiplies bf16 in hardware the whole loop is also measured in bf16, against the bare one in float32.

A GPU's steps are measured by benchmarks/gpu.py.
"""

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from harness import Row, child, finish, in_turn, measured, median_row, parsed, parser, ratios, row, synthetic
from torch import Tensor, nn

from atoll.base.device import own_device
from atoll.base.preemption import Interrupted
from atoll.base.text import many
from atoll.campaign.budget import denoiser_flops
from atoll.campaign.initial import initial_network
from atoll.campaign.runs import Recipe, RunPlan
from atoll.campaign.settings.train import TrainConfig
from atoll.data.dataset import DataSet
from atoll.data.samples import data_shape
from atoll.flow.settings import ObjectiveConfig
from atoll.networks.families import parameter_count
from atoll.networks.settings import DataShape, NetworkConfig
from atoll.store.log import Log
from atoll.store.store import Store
from atoll.train import loop
from atoll.train.rows import Batch, TrainingRows
from atoll.train.tasks import DenoiserTask

EVERY = 100  # steps of a turn that are timed, with one checkpoint among them
WARM = 8  # steps of a turn before the clock starts
TURN = WARM + EVERY + 1  # with the step that is told to leave
FIRST = 50  # steps before the first turn
CLASSES, ROW_COUNT = 10, 2048

# The quickstart's experts (as a DiT), and the recipes' smallest network.
SMALL = {"depth": 4, "heads": 2, "head_width": 32, "latents": 16, "batch": 32}
NANO = {"size": "nano", "latents": 16, "batch": 16}


def main() -> None:
    """Measure what `--only` asks for."""
    asked = parser(__doc__, "the smallest network, fewer turns: two minutes", "cases")
    asked.add_argument("--pairs", type=int, help="turns of each loop (quick: 3, else 5)")
    options = parsed(asked, measure)
    pairs = options.pairs or (3 if options.quick else 5)
    cases: dict[str, Callable[[], Any]] = {}
    networks = {"small": SMALL} if options.quick else {"small": SMALL, "nano": NANO}
    for name, network in networks.items():
        for cores, threads in [(1, 1), (2, 1)] if options.quick else [(1, 1), (2, 1), (2, 2)]:
            if cores <= (os.cpu_count() or 1):
                case = f"{name}: {many(cores, 'core')}, {many(threads, 'thread')}"
                cases[case] = partial(on_cores, case, ("<=", 1.05), cores, threads, pairs=pairs, **network)
        if torch.cpu.get_capabilities().get("avx512_bf16"):
            case = f"{name}: 1 core, 1 thread, whole in bf16"
            cases[case] = partial(on_cores, case, None, 1, 1, pairs=pairs, precision="bf16", **network)
    rows = measured(options, cases)
    finish("training", rows, options, {"pairs": pairs, "steps_per_turn": EVERY})


# The processor.


def on_cores(case: str, target: tuple[str, float] | None, cores: int, threads: int, **work: Any) -> list[Row]:
    """Both loops on the first so many cores, each with so many threads."""
    quiet = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return ratio_rows(case, child(__file__, cores, quiet, threads=threads, **work), target)


def ratio_rows(case: str, found: dict[str, Any], target: tuple[str, float] | None) -> list[Row]:
    """Both loops' milliseconds and their ratio."""
    return [
        median_row(case, "whole / bare, time per step", ratios(found["whole"], found["bare"]), target=target),
        median_row(case, "whole / bare, processor time", ratios(found["whole_work"], found["bare_work"])),
        median_row(case, "bare loop, per step", [1e3 * s for s in found["bare"]], "ms"),
        median_row(case, "whole loop, per step", [1e3 * s for s in found["whole"]], "ms"),
        row(case, "parameters", found["parameters"]),
        row(case, "checkpoints per 100 steps", found["checkpoints"]),
    ]


# What a child process does.


def measure(
    pairs: int,
    latents: int,
    batch: int,
    threads: int,
    *,
    precision: Literal["auto", "bf16"] = "auto",
    **network: Any,
) -> dict[str, Any]:
    """Seconds per step of both loops, in turn, on latents of `latents` pixels a side.

    `precision` is of the whole one.
    """
    torch.set_num_threads(threads)
    settings = NetworkConfig(family="dit", patch=2, **network)
    training = TrainConfig(
        batch=batch,
        threads=threads,
        precision=precision,
        validations=0,
        previews=0,
        checkpoint_every_s=6e07,
        milestones=pairs + 1,  # one in TURN steps
    )
    with tempfile.TemporaryDirectory() as scratch:
        store = Store.open(scratch, create=True)
        dataset = random_latents(store.sub("data"), latents)
        shape = data_shape(dataset, "class")
        make = maker(settings, training, dataset, (pairs + 1) * TURN)
        names = ("whole", "bare", "whole_work", "bare_work")
        found: dict[str, list[float]] = {name: [] for name in names}
        checkpoints = 0
        whole_turn(make, store.sub("monolith"), 0, FIRST)  # so that checkpoints come in the middle of turns
        for whole in in_turn((False, True), pairs):
            if whole:
                seconds, work, written = whole_turn(make, store.sub("monolith"))
                checkpoints += written
            else:
                seconds, work = bare_turn(make)
            found["whole" if whole else "bare"].append(seconds)
            found["whole_work" if whole else "bare_work"].append(work)
    if checkpoints != pairs:
        print(f"warning: {checkpoints} checkpoints in {pairs} turns of {EVERY} steps", file=sys.stderr)
    return {
        **found,
        "checkpoints": checkpoints / pairs,
        "parameters": parameter_count(initial_network(settings, shape, 0)),
    }


Make = Callable[[], tuple[DenoiserTask, Recipe]]


def recipe_of(network: NetworkConfig, shape: DataShape, train: TrainConfig, rows: int, steps: int) -> Recipe:
    """The recipe of a run that belongs to no campaign."""
    flops = denoiser_flops(network, shape)
    plan = RunPlan(
        role="monolith",
        rows=rows,
        steps=steps,
        batch=train.batch,
        partition="",
        seed=0,
        init_seed=0,
        init_sha256=None,
        train_flops=steps * train.batch * flops.train,
        forward_flops=flops.forward,
        shape=shape,
    )
    return Recipe(objective=ObjectiveConfig(), train=train, network=network.model_dump(), plan=plan)


def maker(settings: NetworkConfig, training: TrainConfig, dataset: DataSet, steps: int) -> Make:
    """What makes the task and its recipe anew, with the same initial weights."""
    shape = data_shape(dataset, "class")
    recipe = recipe_of(settings, shape, training, len(dataset), steps)
    rows = TrainingRows.of(dataset, "class", recipe)

    def make() -> tuple[DenoiserTask, Recipe]:
        network = initial_network(settings, shape, 0).to(own_device())
        return DenoiserTask(network, rows), recipe

    return make


class Clocked:
    """A task that looks at the clock before its steps, and ends the turn as a user would: by a signal."""

    def __init__(self, task: DenoiserTask, first: int, last: int) -> None:
        self.task, self.first, self.last, self.calls = task, first, last, 0
        self.began = self.ended = (0.0, 0.0, 0.0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def step(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        if self.calls == self.first:
            self.began = now()
        if self.calls == self.last:
            self.ended = now()
            signal.raise_signal(signal.SIGTERM)
        self.calls += 1
        return self.task.step(batch)


def whole_turn(
    make: Make, run: Store, first: int = WARM, last: int = WARM + EVERY
) -> tuple[float, float, int]:
    """Seconds and processor seconds per step of the whole loop, and checkpoints written meanwhile."""
    clocked = Clocked(make()[0], first, last)
    with contextlib.suppress(Interrupted):
        loop.train(clocked, run, "whole loop")
    commits = [entry for entry in Log(run.sub("run"), "reader").entries() if entry.kind == "commit"]
    written = [entry for entry in commits if clocked.began[0] < entry.time < clocked.ended[0]]
    return *per_step(clocked.began, clocked.ended), len(written)


def bare_turn(make: Make) -> tuple[float, float]:
    """Seconds and processor seconds per step of a bare loop."""
    task, recipe = make()
    network, settings = task.network, recipe.train
    batches = [task.batch(range(i * settings.batch, (i + 1) * settings.batch)) for i in range(8)]
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=0.0, fused=True
    )
    network.train()
    for step in range(WARM + EVERY):
        if step == WARM:
            began = now()
        bare_step(network, optimizer, batches[step % len(batches)])
    return per_step(began, now())


def bare_step(network: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Forward, loss, backward, update: PyTorch and diffusers alone."""
    optimizer.zero_grad(set_to_none=True)
    t = batch.t[:, None, None, None]
    x = (1 - t) * batch.x0 + t * batch.eps
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.device.type != "cpu"):
        output = network(x, timestep=1000 * batch.t, class_labels=batch.cond.labels).sample
    loss = nn.functional.mse_loss(output.float(), batch.eps - batch.x0)
    loss.backward()
    optimizer.step()


def random_latents(store: Store, side: int) -> DataSet:
    """Latents with labels, in Atoll's own format."""
    latents = torch.randn(ROW_COUNT, 4, side, side, generator=torch.Generator().manual_seed(0)).half()
    split = torch.from_numpy((np.arange(ROW_COUNT) % 16 == 15).astype(np.int8))
    columns = {"latents": lambda _: latents, "split": lambda _: split}
    return synthetic(store, [ROW_COUNT], columns, classes=CLASSES)


Moment = tuple[float, float, float]


def now() -> Moment:
    """Time of day, a clock for differences, and processor time, once the GPU has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.time(), time.perf_counter(), time.process_time()


def per_step(began: Moment, ended: Moment) -> tuple[float, float]:
    """Seconds and processor seconds of each of a turn's steps."""
    return (ended[1] - began[1]) / EVERY, (ended[2] - began[2]) / EVERY


if __name__ == "__main__":
    main()
