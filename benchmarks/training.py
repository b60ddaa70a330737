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

With a GPU also DiT-XL/2 at 256 tokens (quick: DiT-B/2) in bf16: images and operations per second, the share
of the measured speed of a large matrix product, and memory, with and without compile, average and
recomputed activations.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from harness import finish, median_row, row
from torch import Tensor, nn

from atoll.base.device import own_device
from atoll.campaign.budget import denoiser_flops
from atoll.campaign.initial import initial_network
from atoll.campaign.runs import Recipe, RunPlan
from atoll.campaign.settings.train import TrainConfig
from atoll.data.dataset import ROWS, DataSet, to_parquet
from atoll.data.formats import Manifest, Shard
from atoll.data.samples import data_shape
from atoll.flow.settings import ObjectiveConfig
from atoll.networks.families import parameter_count
from atoll.networks.settings import NetworkConfig
from atoll.store.log import Log
from atoll.store.manifest import write_file
from atoll.store.store import Store
from atoll.train import loop
from atoll.train.ema import Ema
from atoll.train.expert import DenoiserTask
from atoll.train.preemption import Interrupted
from atoll.train.rows import Batch, TrainingRows

EVERY = 100  # steps of a turn that are timed, with one checkpoint among them
WARM = 8  # steps of a turn before the clock starts
TURN = WARM + EVERY + 1  # with the step that is told to leave
FIRST = 50  # steps before the first turn, so that checkpoints come in the middle of each
CLASSES, ROW_COUNT = 10, 2048

# The quickstart's experts (as a DiT), and the recipes' smallest network.
SMALL = {"depth": 4, "heads": 2, "head_width": 32, "latents": 16, "batch": 32}
NANO = {"size": "nano", "latents": 16, "batch": 16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest network, fewer turns: two minutes")
    parser.add_argument("--pairs", type=int, help="turns of each loop (quick: 3, else 5)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)  # what a child process measures
    options = parser.parse_args()
    if options.work:
        work = json.loads(options.work)
        Path(work.pop("out")).write_text(json.dumps(measure(**work)))
        return
    pairs = options.pairs or (3 if options.quick else 5)
    started, load = time.monotonic(), os.getloadavg()
    table = processor(options.quick, pairs)
    if torch.cuda.is_available():
        table += accelerator("B" if options.quick else "XL", pairs)
    notes = {
        "quick": options.quick,
        "pairs": pairs,
        "steps_per_turn": EVERY,
        "load_before": [round(part, 2) for part in load],
        "seconds": round(time.monotonic() - started, 1),
    }
    finish("training", table, options.json, notes)


# The processor.


def processor(quick: bool, pairs: int) -> list[dict[str, Any]]:
    """Every way of giving cores and threads to both loops."""
    ways = [(1, 1), (2, 1)] if quick else [(1, 1), (2, 1), (2, 2)]
    there = os.cpu_count() or 1
    networks: dict[str, dict[str, Any]] = {"small": SMALL} if quick else {"small": SMALL, "nano": NANO}
    table = []
    for name, network in networks.items():
        for cores, threads in ways:
            if cores > there:
                continue
            found = child(cores=cores, threads=threads, pairs=pairs, **network)
            case = f"{name}: {count(cores, 'core')}, {count(threads, 'thread')}"
            table += ratio_rows(case, found)
        if torch.cpu.get_capabilities().get("avx512_bf16"):
            found = child(cores=1, threads=1, pairs=pairs, precision="bf16", **network)
            table += ratio_rows(f"{name}: 1 core, 1 thread, whole in bf16", found, None)
    return table


def count(number: int, what: str) -> str:
    """`1 core`, `2 cores`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def ratio_rows(
    case: str, found: dict[str, Any], target: tuple[str, float] | None = ("<=", 1.05)
) -> list[dict[str, Any]]:
    """Both loops' milliseconds and their ratio."""
    ratios = [w / b for w, b in zip(found["whole"], found["bare"], strict=True)]
    work = [w / b for w, b in zip(found["whole_work"], found["bare_work"], strict=True)]
    return [
        median_row(case, "whole / bare, time per step", ratios, target=target),
        median_row(case, "whole / bare, processor time", work),
        median_row(case, "bare loop, per step", [1e3 * s for s in found["bare"]], "ms"),
        median_row(case, "whole loop, per step", [1e3 * s for s in found["whole"]], "ms"),
        row(case, "parameters", found["parameters"]),
        row(case, "checkpoints per 100 steps", found["checkpoints"]),
    ]


def child(cores: int | None = None, threads: int = 1, on_gpu: bool = False, **work: Any) -> dict[str, Any]:
    """`measure` in a process of its own, bound to so many cores before it starts a thread."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "found.json"
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        if not on_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        argv = [sys.executable, __file__, "--work", json.dumps({**work, "threads": threads, "out": str(out)})]
        subprocess.run(argv, check=True, env=environment, preexec_fn=lambda: bind(cores))
        return dict(json.loads(out.read_text()))


def bind(cores: int | None) -> None:
    """Use the first so many of the cores that this process may use."""
    if cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])


# What a child process does.


def measure(
    pairs: int,
    latents: int,
    batch: int,
    threads: int,
    *,
    bare: bool = True,
    compiled: bool = False,
    recompute: bool = False,
    precision: Literal["auto", "bf16"] = "auto",
    average: bool = True,
    **network: Any,
) -> dict[str, Any]:
    """Seconds per step of both loops, in turn.

    Args:
        pairs: turns of each.
        latents: side of a latent; patches are 2 wide.
        batch: samples per step.
        threads: of the process.
        bare: whether the bare loop is measured too.
        compiled: whether the network is compiled, in both.
        recompute: whether activations are recomputed, in both.
        precision: of the whole loop; the bare one has bf16 on a GPU only.
        average: whether the whole loop averages the weights.
        network: size of the network.
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
        parallel={"compile": compiled, "checkpointing": recompute},  # type: ignore[arg-type]
    )
    if not average:
        loop.Ema = NoAverage  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as scratch:
        store = Store.open(scratch, create=True)
        dataset = synthetic(store.sub("data"), latents)
        shape = data_shape(dataset, "class")
        make = maker(settings, training, dataset, (pairs + 1) * TURN)
        names = ("whole", "bare", "whole_work", "bare_work", "memory")
        found: dict[str, list[float]] = {name: [] for name in names}
        checkpoints = 0
        whole_turn(make, store.sub("monolith"), 0, FIRST)
        for pair in range(pairs):
            # Who goes first changes, so that what drifts hits both.
            for whole in (True, False) if pair % 2 else (False, True):
                if whole:
                    seconds, work, written = whole_turn(make, store.sub("monolith"))
                    found["memory"].append(peak_memory())
                    checkpoints += written
                elif bare:
                    seconds, work = bare_turn(make)
                else:
                    continue
                found["whole" if whole else "bare"].append(seconds)
                found["whole_work" if whole else "bare_work"].append(work)
    if checkpoints != pairs:
        print(f"warning: {checkpoints} checkpoints in {pairs} turns of {EVERY} steps", flush=True)
    return {
        **found,
        "checkpoints": checkpoints / pairs,
        "parameters": parameter_count(initial_network(settings, shape, 0)),
        "train_flops": denoiser_flops(settings, shape).train * batch,
    }


Make = Callable[[], tuple[DenoiserTask, Recipe]]


def maker(settings: NetworkConfig, training: TrainConfig, dataset: DataSet, steps: int) -> Make:
    """What makes the task and its recipe anew, with the same initial weights."""
    shape = data_shape(dataset, "class")
    flops = denoiser_flops(settings, shape)
    plan = RunPlan(
        role="monolith",
        rows=len(dataset),
        steps=steps,
        batch=training.batch,
        partition="",
        seed=0,
        init_seed=0,
        init_sha256=None,
        train_flops=steps * training.batch * flops.train,
        forward_flops=flops.forward,
        shape=shape,
    )
    recipe = Recipe(objective=ObjectiveConfig(), train=training, network=settings.model_dump(), plan=plan)
    rows = TrainingRows.of(dataset, "class", recipe)

    def make() -> tuple[DenoiserTask, Recipe]:
        network = initial_network(settings, shape, 0).to(own_device())
        return DenoiserTask(network, rows), recipe

    return make


class NoAverage(Ema):
    """The weights themselves in place of their average: no memory, no work."""

    def __init__(self, network: nn.Module, half_life: float, ramp: float) -> None:
        self.half_life, self.ramp = half_life, ramp
        self.weights = {name: p.detach() for name, p in network.named_parameters()}

    def update(self, samples: int, batch: int) -> None:
        pass


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
    fresh()
    clocked = Clocked(make()[0], first, last)
    with contextlib.suppress(Interrupted):
        loop.train(clocked, run, "whole loop")
    commits = [entry for entry in Log(run.sub("run"), "reader").entries() if entry.kind == "commit"]
    written = [entry for entry in commits if clocked.began[0] < entry.time < clocked.ended[0]]
    return *per_step(clocked.began, clocked.ended), len(written)


def bare_turn(make: Make) -> tuple[float, float]:
    """Seconds and processor seconds per step of a bare loop."""
    fresh()
    task, recipe = make()
    network, settings, device = task.network, recipe.train, own_device()
    batches = [task.batch(range(i * settings.batch, (i + 1) * settings.batch)).to(device) for i in range(8)]
    if settings.parallel.checkpointing:
        network.enable_gradient_checkpointing()  # type: ignore[operator]
    if settings.parallel.compile:
        network.compile()
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


def synthetic(store: Store, side: int) -> DataSet:
    """Random latents with labels, in Atoll's own format."""
    source = torch.Generator().manual_seed(0)
    names = [f"{number:06d}" for number in range(ROW_COUNT)]
    content = {name: [None] * ROW_COUNT for name in ROWS.names}
    content |= {"id": names, "label": [number % CLASSES for number in range(ROW_COUNT)]}
    table = pa.table(content, schema=ROWS)
    entry = write_file(store, ".", "rows/00000.parquet", to_parquet(table))
    shards = [Shard(rows=ROW_COUNT, files={"rows": entry})]
    dataset = DataSet(
        store, "", Manifest(identity="synthetic", source={"name": "random"}, rows=ROW_COUNT, shards=shards)
    )
    latents = torch.randn(ROW_COUNT, 4, side, side, generator=source).half()
    split = torch.from_numpy((np.arange(ROW_COUNT) % 16 == 15).astype(np.int8))
    dataset.write_column("latents", {"name": "random", "hash": ""}, lambda _: {"values": latents})
    dataset.write_column("split", {"name": "random"}, lambda _: {"values": split})
    return dataset.finish()


Moment = tuple[float, float, float]


def now() -> Moment:
    """Time of day, a clock for differences, and processor time, once the GPU has done what it was told."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.time(), time.perf_counter(), time.process_time()


def per_step(began: Moment, ended: Moment) -> tuple[float, float]:
    """Seconds and processor seconds of each of a turn's steps."""
    return (ended[1] - began[1]) / EVERY, (ended[2] - began[2]) / EVERY


def fresh() -> None:
    """Nothing compiled, and the peak of memory forgotten."""
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> float:
    """GiB that tensors on the GPU took at most since `fresh`; 0 without one."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


# The GPU.

VARIANTS: dict[str, dict[str, Any]] = {
    "compiled": {"compiled": True},
    "not compiled": {},
    "no average": {"compiled": True, "average": False, "bare": False},
    "recomputed": {"compiled": True, "recompute": True, "bare": False},
}


def accelerator(
    size: str, pairs: int, batch: int = 64, latents: int = 32, side: int = 8192
) -> list[dict[str, Any]]:
    """A DiT at 256 tokens in bf16, each variant in a process of its own."""
    ceiling, threads = matrix_product(side), min(8, os.cpu_count() or 1)
    table = [row("matrix product", f"bf16, {side} x {side}", ceiling / 1e12, "TFLOP/s")]
    for name, variant in VARIANTS.items():
        sizes = {"size": size, "latents": latents, "batch": batch}
        found = child(threads=threads, on_gpu=True, pairs=pairs, **sizes, **variant)
        case = f"DiT-{size}/2, {name}"
        speed = found["train_flops"] / statistics.median(found["whole"])
        table += ratio_rows(case, found) if found["bare"] else []
        table += [
            median_row(case, "images per second", [batch / s for s in found["whole"]], "1/s"),
            row(case, "operations", speed / 1e12, "TFLOP/s"),
            row(case, "share of the matrix product's", speed / ceiling),
            row(case, "peak memory", max(found["memory"]), "GiB"),
        ]
    return table


def matrix_product(side: int, times: int = 20) -> float:
    """Operations per second of a large bf16 matrix product: what this device reaches at best."""
    device = own_device()
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(times + 3):
        before = now()[1]
        torch.mm(a, b)
        seconds.append(now()[1] - before)
    return 2 * side**3 / statistics.median(seconds[3:])


if __name__ == "__main__":
    main()
