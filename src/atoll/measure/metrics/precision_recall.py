"""What nearest neighbours tell: precision and recall, density and coverage, in float64 and in blocks.

A picture's ball reaches to its k-th nearest neighbour in its own set. Precision (Kynkäänniemi et al. 2019,
k = 3) is the share of samples in the ball of any reference picture, recall the share of reference pictures in
the ball of any sample. Density (Naeem et al. 2020, k = 5) is how many balls of the reference hold a sample,
over k; coverage is the share of balls of the reference that hold any sample. As in the papers' programs, the
balls of precision and recall hold their edge, those of density and coverage do not. Squared distances come
from a product of matrices; two that differ by less than its rounding count as equal, so that copies of one
picture, as a collapsed model makes them, lie exactly on an edge.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from atoll.base.errors import DataError
from atoll.measure.metrics.metric import How, Metric, Value
from atoll.measure.pictures import F32, Features

PRECISION_K, DENSITY_K = 3, 5
FEW, LONE = 500, 0.05
"""Pictures and recall, below which a reader is warned: uniform noise against 20 emoji has a precision of 0.8,
against 100 to 700 one of 0.3 to 0.5, and a recall of 0 (other emoji 0.8 and 0.8)."""
PRAISE = ("precision", "density")
"""What samples may have much of without being good."""
ROUNDING = 1e-12
"""Of a squared distance, as a part of the two squared lengths that it is the difference of."""
BLOCK = 1024
"""Rows of each set whose distances are held at once, in a handful of copies."""


class Neighbours(Metric):
    """Precision and recall, density and coverage."""

    names = ("precision", "recall", "density", "coverage")
    few = DENSITY_K

    def settings(self, name: str, how: How) -> dict[str, Any]:
        return {"k": PRECISION_K if name in ("precision", "recall") else DENSITY_K}

    def compute(self, how: How, samples: Features, reference: Features) -> Mapping[str, Value]:
        shares, notes = neighbourhoods(samples.rows, reference, device=how.device), list[str]()
        if (fewest := min(how.samples, how.references)) < FEW:
            notes.append(f"{fewest} pictures on a side are few: their wide neighbourhoods may hold noise")
        # Noise is all alike to an extractor: the balls of a few outliers may hold all of it.
        lone = f"with a recall of {shares['recall']:.2g} the samples may lie near a few images, as noise does"
        praise = [*notes, *([lone] if shares["recall"] < LONE else [])]
        return {
            name: Value(share, None, tuple(praise if name in PRAISE else notes))
            for name, share in shares.items()
        }


METRICS = (Neighbours(),)
# Balls of a reference: the models of a comparison share it, and all pairs of 40,000 pictures take minutes.
_BALLS: "WeakKeyDictionary[Features, Tensor]" = WeakKeyDictionary()


def radii(rows: F32, k: int, device: torch.device | str = "cpu") -> Tensor:
    """Squared distance of every row to its 1st ... k-th nearest other row, `(N, k)` float64."""
    if len(rows) <= k:
        raise DataError(f"{len(rows)} pictures have no {k}-th neighbour", f"give more than {k}")
    all_nearest = []
    for first, block in _numbered(rows, device):
        nearest = block.new_full((len(block), k), torch.inf)
        for other, rest in _numbered(rows, device):
            distances = _squared(block, rest)[0]
            if other == first:
                distances.fill_diagonal_(torch.inf)  # not its own neighbour
            nearest = torch.cat([nearest, distances], dim=1).topk(k, largest=False).values
        all_nearest.append(nearest)
    return torch.cat(all_nearest)


def neighbourhoods(samples: F32, real: Features, device: torch.device | str = "cpu") -> dict[str, float]:
    """`precision`, `recall`, `density` and `coverage` of samples against a reference."""
    if real not in _BALLS:
        _BALLS[real] = radii(real.rows, max(PRECISION_K, DENSITY_K), device)
    balls, reference = _BALLS[real].to(device), real.rows
    wide, dense = balls[:, PRECISION_K - 1], balls[:, DENSITY_K - 1]
    balls_of_samples = radii(samples, PRECISION_K, device)[:, -1]
    precise, held = (torch.zeros(len(samples), dtype=torch.int64, device=device) for _ in range(2))
    recalled, covered = (torch.zeros(len(reference), dtype=torch.bool, device=device) for _ in range(2))
    for first, block in _numbered(samples, device):
        here = slice(first, first + len(block))
        for other, rest in _numbered(reference, device):
            there = slice(other, other + len(rest))
            distances, rounding = _squared(block, rest)
            # Before precision and recall, which change the distances in place.
            inside = distances < dense[there] - rounding
            held[here] += inside.sum(1)
            distances -= rounding
            precise[here] += (distances <= wide[there]).sum(1)
            recalled[there] |= (distances <= balls_of_samples[here, None]).any(0)
            covered[there] |= inside.any(0)
    return {
        "precision": float((precise > 0).double().mean()),
        "recall": float(recalled.double().mean()),
        "density": float(held.double().mean()) / DENSITY_K,
        "coverage": float(covered.double().mean()),
    }


def _numbered(rows: F32, device: torch.device | str) -> Iterator[tuple[int, Tensor]]:
    """Blocks of rows, each with the number of its first one."""
    for first in range(0, len(rows), BLOCK):
        yield first, torch.from_numpy(rows[first : first + BLOCK]).to(device).double()


def _squared(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances `(B, C)` of rows `(B, D)` and `(C, D)`, and what of them may be rounding."""
    lengths = (one**2).sum(1)[:, None] + (other**2).sum(1)
    # Python evaluates from left to right, so `lengths` are used before they are scaled in place.
    return torch.addmm(lengths, one, other.T, alpha=-2).clamp_(min=0), lengths.mul_(ROUNDING)
