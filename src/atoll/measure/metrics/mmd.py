"""Distances of kernels between two sets of features: KID and CMMD, in float64 and in blocks."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.base.errors import DataError
from atoll.base.rng import generator
from atoll.measure.metrics.metric import How, Metric, Value
from atoll.measure.pictures import F32, Features

Index = NDArray[np.int64]
Kernel = Callable[[Tensor, Tensor], Tensor]
CMMD_SIGMA, CMMD_SCALE = 10.0, 1000.0
FEW = 5
"""Pictures of a set that no kernel distance is taken of."""
BLOCK = 2048
"""Rows that are worked on at once."""
SMALL = 256
"""Rows whose products with each other are all computed: below it, fewer products cost more time."""


class Kid(Metric):
    """Kernel distance with a polynomial kernel, unbiased: it is 0 between sets of one distribution."""

    names = ("kid",)
    few = FEW

    def label(self, name: str, how: How) -> str:
        """KID on Inception's features, and nowhere else."""
        return "KID" if how.kind == "inception" else f"kernel distance on {how.extractor}"

    def settings(self, name: str, how: How) -> dict[str, Any]:
        size = min(how.subset, how.samples, how.references)
        return {"subsets": how.subsets, "size": size, "seed": how.seed}

    def compute(self, how: How, samples: Features, reference: Features) -> Mapping[str, Value]:
        return {"kid": kid(samples.rows, reference.rows, **self.settings("kid", how), device=how.device)}


class Cmmd(Metric):
    """Kernel distance with a Gaussian kernel on features of length 1."""

    names = ("cmmd",)
    few = FEW

    def label(self, name: str, how: How) -> str:
        """CMMD on CLIP's features, and nowhere else."""
        return "CMMD" if how.kind == "clip" else f"Gaussian MMD on {how.extractor}"

    def settings(self, name: str, how: How) -> dict[str, Any]:
        return {"sigma": CMMD_SIGMA, "scale": CMMD_SCALE}

    def compute(self, how: How, samples: Features, reference: Features) -> Mapping[str, Value]:
        return {"cmmd": Value(cmmd(samples.rows, reference.rows, device=how.device))}


METRICS = (Kid(), Cmmd())


def kid(
    samples: F32,
    reference: F32,
    subsets: int = 100,
    size: int = 1000,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Value:
    """The unbiased estimate of MMD^2 with the kernel (x.y / D + 1)^3, its mean over random subsets.

    Bińkowski et al. 2018. Subsets of `size` rows of each set are drawn as there: without replacement, one
    set's apart from the other's. `DataError` for fewer rows than a subset takes, or subsets of one.
    """
    least = min(len(samples), len(reference))
    if not 2 <= size <= least:
        raise DataError(f"subsets of {size} out of {least} pictures", f"use subsets of 2 to {least}")
    # A set of that many rows is the same in every subset: of two such sets one subset is enough, and their
    # spread would tell nothing.
    whole, values = [len(rows) == size for rows in (samples, reference)], list[float]()
    for number in range(1 if all(whole) else subsets):
        one, other = (
            torch.randperm(len(rows), generator=generator(seed, f"kid/{which}", number))[:size].numpy()
            for rows, which in ((samples, "samples"), (reference, "reference"))
        )
        values.append(_mmd(samples, reference, _polynomial, one, other, unbiased=True, device=device))
    return Value(float(np.mean(values)), None if any(whole) or len(values) == 1 else float(np.std(values)))


def cmmd(
    samples: F32, reference: F32, sigma: float = CMMD_SIGMA, device: torch.device | str = "cpu"
) -> float:
    """1000 MMD^2 with the kernel exp(-|x - y|^2 / (2 sigma^2)) on features of length 1, over all pairs.

    Jayasumana et al. 2024, on CLIP's projected features. As there it is the estimate of least variance, which
    counts a picture with itself and so is slightly biased.
    """

    def gaussian(one: Tensor, other: Tensor) -> Tensor:
        cosines = torch.nn.functional.normalize(one) @ torch.nn.functional.normalize(other).T
        # |x - y|^2 = 2 - 2 x.y. The kernel less 1, which changes no MMD over all pairs and loses no digits.
        return torch.expm1((cosines - 1).clamp(max=0) / sigma**2)

    everyone = np.arange(len(samples)), np.arange(len(reference))
    return CMMD_SCALE * _mmd(samples, reference, gaussian, *everyone, unbiased=False, device=device)


def _polynomial(one: Tensor, other: Tensor) -> Tensor:
    # In place: each step would else hold one more copy of the block.
    return (one @ other.T).div_(one.shape[1]).add_(1).pow_(3)


def _mmd(
    one: F32, other: F32, kernel: Kernel, i: Index, j: Index, *, unbiased: bool, device: torch.device | str
) -> float:
    """MMD^2 between rows `i` of one set and rows `j` of the other."""

    def blocks(rows: F32, index: Index) -> Iterator[Tensor]:
        # Read anew for every pass: a large set as a whole, in float64, may not fit on the device.
        for first in range(0, len(index), BLOCK):
            yield torch.from_numpy(rows[index[first : first + BLOCK]]).to(device).double()

    def within(rows: F32, index: Index) -> float:
        total = 0.0
        for number, block in enumerate(blocks(rows, index)):
            total += _own(block, kernel, unbiased)
            for later in blocks(rows, index[(number + 1) * BLOCK :]):
                total += 2 * float(kernel(block, later).sum())
        return total / (len(index) * (len(index) - int(unbiased)))

    across = 0.0
    for block in blocks(one, i):
        across += sum(float(kernel(block, rest).sum()) for rest in blocks(other, j))
    return within(one, i) + within(other, j) - 2 * across / (len(i) * len(j))


def _own(block: Tensor, kernel: Kernel, unbiased: bool) -> float:
    """Sum over all pairs of a block, without the diagonal where `unbiased`. Halves meet once, so that little
    more than half of the products is needed."""
    if len(block) > SMALL:
        half = len(block) // 2
        one, other = block[:half], block[half:]
        both = _own(one, kernel, unbiased) + _own(other, kernel, unbiased)
        return both + 2 * float(kernel(one, other).sum())
    values = kernel(block, block)
    return float(values.sum()) - (float(values.diagonal().sum()) if unbiased else 0.0)
