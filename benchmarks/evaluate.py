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

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from harness import (
    Row,
    child,
    finish,
    forget_peak,
    measured,
    median_row,
    memory,
    paired,
    parsed,
    parser,
    ratios,
    row,
)
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from atoll.measure import pictures
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
    """Measure what `--only` asks for."""
    asked = parser(__doc__, "few and narrow features: two minutes", "parts (time, memory of ...)")
    asked.add_argument("--pairs", type=int, help="turns of each side (quick: 2, else 5)")
    asked.add_argument("--threads", type=int, default=os.cpu_count(), help="of the CPU; all by default")
    options = parsed(asked, peak)
    use_threads(options.threads)
    setting, pairs = (QUICK, options.pairs or 2) if options.quick else (FULL, options.pairs or 5)
    cases = {"time": partial(times, setting, pairs)}
    cases |= {f"memory of {turn}": partial(memories, turn, setting, options.threads) for turn in TURNS}
    finish("evaluate", measured(options, cases), options, {"pairs": pairs, "threads": options.threads})


def use_threads(count: int) -> None:
    """Of torch, and of NumPy's and SciPy's products."""
    warnings.filterwarnings("ignore", message="Metric `Kernel Inception Distance` will save")
    torch.set_num_threads(count)
    threadpool_limits(count)


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


def rows(features: Features, reference: bool) -> pictures.F32:
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
    return neighbourhoods(rows(features, False), pictures.Features(rows(features, True)))["density"]


TURNS: dict[str, Callable[[Features], float]] = {
    "Fréchet": our_frechet,
    "Fréchet, torchmetrics": their_frechet,
    "KID": our_kid,
    "KID, torchmetrics": lambda features: their_kid(features, torch.float32),
    "neighbours": our_neighbours,
}


def times(setting: Setting, pairs: int) -> Iterator[Row]:
    """Seconds of both sides, in turn, and whether they find the same."""
    features = Features(setting)
    case = f"{setting.count} x {setting.width}"
    for name, one, other in (("Fréchet", our_frechet, their_frechet), ("KID", our_kid, their_kid)):
        values = [0.0, 0.0]

        def keep(number: int, turn: Callable[[Features], float], values: list[float] = values) -> None:
            values[number] = turn(features)

        most = max(setting.batch, setting.subset, setting.width)
        small = Features(replace(setting, count=2 * most, subsets=1))
        one(small), other(small)  # what the libraries do once
        ours, theirs = paired([partial(keep, 0, one), partial(keep, 1, other)], pairs)
        yield median_row(case, f"{name} / torchmetrics, time", ratios(ours, theirs), target=("<=", 1.0))
        yield median_row(case, f"{name}, time", ours, "s")
        yield median_row(case, f"{name}, torchmetrics, time", theirs, "s")
        if name == "Fréchet":
            difference = abs(values[0] - values[1]) / abs(values[1])
            yield row(case, "Fréchet, relative difference", difference, target=("<=", 1e-4))


def memories(turn: str, setting: Setting, threads: int) -> Iterator[Row]:
    """Peak memory for a fifth, a half, and all of the features."""
    most = setting.neighbours if turn == "neighbours" else setting.count
    # By default glibc keeps some of what is freed, as chance has it.
    environment, peaks = {"MALLOC_MMAP_THRESHOLD_": "262144"}, []
    for count in (most // 5, most // 2, most):
        size = asdict(replace(setting, count=count - count % setting.batch))
        peaks.append(child(__file__, None, environment, turn=turn, setting=size, threads=threads))
        yield row(f"memory at {count}", turn, peaks[-1] / 2**20, "MiB")
    yield row("memory", f"{turn}, at all / at a fifth", peaks[-1] / max(peaks[0], 1))


def peak(turn: str, setting: dict[str, Any], threads: int) -> float:
    """Bytes that a turn takes at most, beyond what the process had before it."""
    use_threads(threads)
    size = Setting(**setting)
    least = 2 * max(size.batch, size.subset, 2 * 8)
    TURNS[turn](Features(Setting(least, 8, size.batch, 1, size.subset)))  # what libraries take once
    features = Features(size)
    before = forget_peak()
    TURNS[turn](features)
    return float(memory("VmHWM") - before)


if __name__ == "__main__":
    main()
