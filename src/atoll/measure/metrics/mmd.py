"""Distances of kernels between two sets of features: KID and CMMD, in float64 and in blocks."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.base.errors import DataError
from atoll.base.rng import generator
from atoll.measure.features import F32, Features
from atoll.measure.metrics.metric import How, Metric, Value, enough

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

    def label(self, name: str, how: How) -> str:
        """KID on Inception's features, and nowhere else."""
        return "KID" if how.kind == "inception" else f"kernel distance on {how.extractor}"

    def settings(self, name: str, how: How) -> dict[str, Any]:
        size = min(how.subset, how.samples, how.references)
        return {"subsets": how.subsets, "size": size, "seed": how.seed}

    def check(self, how: How) -> None:
        enough(how, FEW)

    def compute(self, how: How, samples: Features, reference: Features) -> Mapping[str, Value]:
        return {"kid": kid(samples.rows, reference.rows, **self.settings("kid", how), device=how.device)}


class Cmmd(Metric):
    """Kernel distance with a Gaussian kernel on features of length 1."""

    names = ("cmmd",)

    def label(self, name: str, how: How) -> str:
        """CMMD on CLIP's features, and nowhere else."""
        return "CMMD" if how.kind == "clip" else f"Gaussian MMD on {how.extractor}"

    def settings(self, name: str, how: How) -> dict[str, Any]:
        return {"sigma": CMMD_SIGMA, "scale": CMMD_SCALE}

    def check(self, how: How) -> None:
        enough(how, FEW)

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

    Bińkowski et al. 2018. Subsets are drawn as there: without replacement, one set's apart from the other's.

    Args:
        samples: features that are judged.
        reference: what they are held against.
        subsets: how many.
        size: rows of each set in a subset; a larger one than a set is refused. A set of that many rows is the
            same in every subset, so there is no deviation then, and of two such sets one subset is enough.
        seed: of the subsets.
        device: where it is computed.

    Raises:
        DataError: fewer rows than a subset takes, or subsets of fewer than two.
    """
    least = min(len(samples), len(reference))
    if not 2 <= size <= least:
        raise DataError(f"subsets of {size} out of {least} pictures", f"use subsets of 2 to {least}")
    whole = [len(rows) == size for rows in (samples, reference)]
    values = []
    for number in range(1 if all(whole) else subsets):
        one, other = (
            torch.randperm(len(rows), generator=generator(seed, f"kid/{which}", number))[:size].numpy()
            for rows, which in ((samples, "samples"), (reference, "reference"))
        )
        values.append(_mmd(samples, reference, _polynomial, one, other, unbiased=True, device=device))
    return Value(float(np.mean(values)), None if any(whole) else float(np.std(values)))


def cmmd(
    samples: F32,
    reference: F32,
    sigma: float = CMMD_SIGMA,
    device: torch.device | str = "cpu",
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
    return (one @ other.T).div_(one.shape[1]).add_(1).pow_(3)


class _Chosen:
    """Chosen rows in blocks on a device, in float64; those that fit into one block are read once."""

    def __init__(self, rows: F32, index: Index, device: torch.device | str) -> None:
        self._rows, self._index, self._device = rows, index, device
        self._only = self._read(0) if len(index) <= BLOCK else None

    def __len__(self) -> int:
        return -(-len(self._index) // BLOCK)

    def __getitem__(self, number: int) -> Tensor:
        return self._read(number) if self._only is None else self._only

    def _read(self, number: int) -> Tensor:
        block = self._rows[self._index[number * BLOCK : (number + 1) * BLOCK]]
        return torch.from_numpy(block).to(self._device).double()


def _mmd(
    one: F32,
    other: F32,
    kernel: Kernel,
    i: Index,
    j: Index,
    *,
    unbiased: bool,
    device: torch.device | str,
) -> float:
    n, m, less = len(i), len(j), int(unbiased)
    x, y = _Chosen(one, i, device), _Chosen(other, j, device)
    across = 0.0
    for a in range(len(x)):
        block = x[a]
        across += sum(float(kernel(block, y[b]).sum()) for b in range(len(y)))
    within = _within(x, kernel, unbiased) / (n * (n - less)), _within(y, kernel, unbiased) / (m * (m - less))
    return sum(within) - 2 * across / (n * m)


def _own(block: Tensor, kernel: Kernel, unbiased: bool) -> float:
    """The same of one block. Halves meet once, so that little more than half of the products is needed."""
    if len(block) > SMALL:
        half = len(block) // 2
        one, other = block[:half], block[half:]
        both = _own(one, kernel, unbiased) + _own(other, kernel, unbiased)
        return both + 2 * float(kernel(one, other).sum())
    values = kernel(block, block)
    return float(values.sum()) - (float(values.diagonal().sum()) if unbiased else 0.0)


def _within(chosen: _Chosen, kernel: Kernel, unbiased: bool) -> float:
    """Sum of the kernel over all pairs of a set, without the diagonal where `unbiased`."""
    total = 0.0
    for first in range(len(chosen)):
        block = chosen[first]
        total += _own(block, kernel, unbiased)
        for later in range(first + 1, len(chosen)):
            total += 2 * float(kernel(block, chosen[later]).sum())
    return total
