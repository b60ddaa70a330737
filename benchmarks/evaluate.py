"""Time and memory of the metrics against torchmetrics, on the same features.

    python benchmarks/evaluate.py [--quick] [--pairs N] [--threads N] [--json PATH]

Features are random: no metric's time depends on what they hold. Both sides are given the same batches of
float32, samples and reference alike, and give their number; for torchmetrics the extractor hands through what
it is given. They take turns in one process, and who goes first changes; a ratio is the median over the pairs.

Memory is the peak of a process of its own, less what it had before the first batch, for a growing number of
features. What is freed is given back at once there; by default glibc keeps some of it, as chance has it: up
to 150 MiB more with neighbours. KID is timed in float64 on both sides, as Atoll computes it; torchmetrics'
memory is that of float32, which is kinder to it. Atoll keeps the rows of both sets in memory, float32.

Full: 50,000 features of 2048, and 10,000 for neighbours. Quick: 5,000 of 512.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import finish, median_row, row
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from atoll.measure.features import F32
from atoll.measure.metrics.frechet import frechet_distance
from atoll.measure.metrics.mmd import kid
from atoll.measure.metrics.precision_recall import neighbourhoods


@dataclass(frozen=True)
class Setting:
    """What is measured."""

    count: int = 50_000
    width: int = 2048
    batch: int = 500
    subsets: int = 100
    subset: int = 1000
    neighbours: int = 10_000  # every pair of rows is looked at


FULL = Setting()
QUICK = Setting(5_000, 512, 500, 20, 500, 10_000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few and narrow features: two minutes")
    parser.add_argument("--pairs", type=int, help="turns of each side (quick: 2, else 5)")
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="of the CPU; every core by default"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", help=argparse.SUPPRESS)  # what a child process measures
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Metric `Kernel Inception Distance` will save")
    torch.set_num_threads(options.threads)
    threadpool_limits(options.threads)
    if options.work:
        work = json.loads(options.work)
        print(peak(work["turn"], Setting(**work["setting"])))
        return
    setting, pairs = (QUICK, options.pairs or 2) if options.quick else (FULL, options.pairs or 5)
    started, load = time.monotonic(), os.getloadavg()
    table = [*times(setting, pairs), *memories(setting, options.threads)]
    notes = {
        "quick": options.quick,
        "pairs": pairs,
        "threads": options.threads,
        "load_before": [round(part, 2) for part in load],
        "seconds": round(time.monotonic() - started, 1),
    }
    finish("evaluate", table, options.json, notes)


# Features.


class Features:
    """Batches of features out of a small pool, so that holding them costs no memory worth counting."""

    def __init__(self, setting: Setting) -> None:
        draws = np.random.default_rng(0)
        rows = 2 * setting.width + setting.batch
        basis = draws.normal(size=(setting.width,)).astype(np.float32)
        self.pool = draws.normal(size=(rows, setting.width)).astype(np.float32) + 0.1 * basis
        self.setting = setting

    def batches(self, reference: bool) -> Iterator[NDArray[np.float32]]:
        size, shift = self.setting.batch, np.float32(0.1 if reference else 0.0)
        for number in range(self.setting.count // size):
            first = number * size % (len(self.pool) - size)
            yield self.pool[first : first + size] + shift


class Given(nn.Module):
    """An extractor whose pictures are features already."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_features = width

    def forward(self, x: Tensor) -> Tensor:
        return x


def rows(features: Features, reference: bool) -> F32:
    size = features.setting.batch
    made = np.empty((features.setting.count // size * size, features.setting.width), np.float32)
    for number, batch in enumerate(features.batches(reference)):
        made[number * size : (number + 1) * size] = batch
    return made


def fill(metric: Any, features: Features, dtype: torch.dtype) -> None:
    for reference in (False, True):
        for batch in features.batches(reference):
            metric.update(torch.from_numpy(batch).to(dtype), real=reference)


# Turns.


def our_frechet(features: Features) -> float:
    return frechet_distance(rows(features, False), rows(features, True))


def their_frechet(features: Features) -> float:
    # Sums are in float64 either way; so is the result, if it is asked for.
    metric = FrechetInceptionDistance(Given(features.setting.width)).set_dtype(torch.float64)
    fill(metric, features, torch.float64)
    return float(metric.compute())


def our_kid(features: Features) -> float:
    setting = features.setting
    return kid(rows(features, False), rows(features, True), setting.subsets, setting.subset).value


def their_kid(features: Features, dtype: torch.dtype = torch.float64) -> float:
    setting = features.setting
    metric = KernelInceptionDistance(Given(setting.width), setting.subsets, setting.subset)
    fill(metric, features, dtype)
    return float(metric.compute()[0])


def our_neighbours(features: Features) -> float:
    return neighbourhoods(rows(features, False), rows(features, True))["density"]


TURNS: dict[str, Callable[[Features], float]] = {
    "Fréchet": our_frechet,
    "Fréchet, torchmetrics": their_frechet,
    "KID": our_kid,
    "KID, torchmetrics": lambda features: their_kid(features, torch.float32),
    "neighbours": our_neighbours,
}


def times(setting: Setting, pairs: int) -> Iterator[dict[str, Any]]:
    """Seconds of both sides, in turn, and whether they find the same."""
    features = Features(setting)
    case = f"{setting.count} x {setting.width}"
    for name, one, other in (("Fréchet", our_frechet, their_frechet), ("KID", our_kid, their_kid)):
        seconds: tuple[list[float], list[float]] = ([], [])
        found = [0.0, 0.0]
        most = max(setting.batch, setting.subset, setting.width)
        small = Features(replace(setting, count=2 * most, subsets=1))
        one(small), other(small)  # what the libraries do once
        for pair in range(pairs):
            for which in (1, 0) if pair % 2 else (0, 1):
                before = time.perf_counter()
                found[which] = (one, other)[which](features)
                seconds[which].append(time.perf_counter() - before)
        ratios = [a / b for a, b in zip(*seconds, strict=True)]
        yield median_row(case, f"{name} / torchmetrics, time", ratios, target=("<=", 1.0))
        yield median_row(case, f"{name}, time", seconds[0], "s")
        yield median_row(case, f"{name}, torchmetrics, time", seconds[1], "s")
        if name == "Fréchet":
            difference = abs(found[0] - found[1]) / abs(found[1])
            yield row(case, "Fréchet, relative difference", difference, target=("<=", 1e-4))


def memories(setting: Setting, threads: int) -> Iterator[dict[str, Any]]:
    """Peak memory for a fifth, a half, and all of the features."""
    for turn in TURNS:
        most = setting.neighbours if turn == "neighbours" else setting.count
        peaks = []
        for count in (most // 5, most // 2, most):
            peaks.append(child(turn, replace(setting, count=count - count % setting.batch), threads))
            yield row(f"memory at {count}", turn, peaks[-1] / 2**20, "MiB")
        yield row("memory", f"{turn}, at all / at a fifth", peaks[-1] / max(peaks[0], 1))


def child(turn: str, setting: Setting, threads: int) -> float:
    """`peak` in a process of its own."""
    work = json.dumps({"turn": turn, "setting": asdict(setting)})
    argv = [sys.executable, __file__, "--threads", str(threads), "--work", work]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "262144"}
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=env)
    return float(done.stdout.splitlines()[-1])


def peak(turn: str, setting: Setting) -> float:
    """Bytes that a turn takes at most, beyond what the process had before it."""
    least = 2 * max(setting.batch, setting.subset, 2 * 8)
    TURNS[turn](Features(Setting(least, 8, setting.batch, 1, setting.subset)))  # what libraries take once
    features = Features(setting)
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is what is in use now
    before = memory("VmRSS")
    TURNS[turn](features)
    return float(memory("VmHWM") - before)


def memory(which: str) -> int:
    """Bytes of this process by Linux's account."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{which}:")).split()[1])


if __name__ == "__main__":
    main()
