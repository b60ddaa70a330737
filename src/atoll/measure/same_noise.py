"""Whether two models that start from the same noise draw similar pictures: correlations of pairs.

The paper observes that a monolith and a decentralized model, sampled with the same noise by a deterministic
sampler, give visibly similar pictures. A pair is a sample of each model. Those of one number share noise and
condition; they are held against pairs of different samples, of one cluster and of any.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from atoll.base.rng import generator
from atoll.base.table import finite
from atoll.campaign.measured import PairRow, Partner

MOST = 500
"""Most samples of a model that are kept and paired, its first ones."""
SIDE = 64
"""Pictures with a longer side are reduced to it, pixels averaged, before they are kept."""
Z95 = 1.959964  # the normal distribution's 97.5 % point

F64 = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True)
class SavedSamples:
    """What is kept of a model's first samples: values `(P, V)` of pictures, and features `(P, D)`."""

    pixels: NDArray[np.uint8]
    features: NDArray[np.float32]

    @classmethod
    def pixels_of(cls, numbers: Sequence[int], pictures: Sequence[Image.Image]) -> dict[int, Any]:
        """Values of those pictures of a batch that are among the first, by number."""
        values = dict[int, Any]()
        for number, picture in zip(numbers, pictures, strict=True):
            if number < MOST:
                if (side := max(picture.size)) > SIDE:
                    width, height = (max(1, round(edge * SIDE / side)) for edge in picture.size)
                    picture = picture.resize((width, height), Image.Resampling.BOX)
                values[number] = np.asarray(picture).ravel()
        return values

    def tensors(self) -> dict[str, Tensor]:
        """For a file."""
        return {"pixels": torch.from_numpy(self.pixels), "features": torch.from_numpy(self.features)}

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor]) -> "SavedSamples":
        """What `tensors` gave."""
        return cls(tensors["pixels"].numpy(), tensors["features"].numpy())


def correlations(one: NDArray[np.generic], other: NDArray[np.generic]) -> F64:
    """Pearson correlation `(N,)` of the same rows of both `(N, V)`; NaN where one is constant."""
    first, second = (np.asarray(rows, dtype=np.float64) for rows in (one, other))
    first, second = (rows - rows.mean(axis=1, keepdims=True) for rows in (first, second))
    scale = np.sqrt((first**2).sum(axis=1) * (second**2).sum(axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        correlation: F64 = np.where(scale > 0, (first * second).sum(axis=1) / scale, np.nan)
    return correlation.clip(-1, 1)


def partners(groups: Index, seed: int) -> Index:
    """For each sample another one of its group, drawn so that nobody is chosen twice; -1 for who is alone.

    The seed decides the order within each group `(N,)`, in which everybody gets the next one.
    """
    order = torch.randperm(len(groups), generator=generator(seed, "pairs")).numpy()
    partner = np.full(len(groups), -1, dtype=np.int64)
    for group in np.unique(groups):
        members = order[groups[order] == group]
        if len(members) > 1:
            partner[members] = np.roll(members, -1)
    return partner


def pair_table(
    base: SavedSamples, others: Mapping[str, SavedSamples], clusters: Index, conditions: Index, seed: int
) -> list[PairRow]:
    """Correlations with the base's samples: of the same noise, of the same cluster, of any other sample.

    The same noise comes with the same condition, so a part of what it adds to the others is the condition's.

    Samples of the monolith (`base`) and of each strategy are drawn at the same conditions, whose clusters and
    numbers these are, `(P,)` or longer. Partners of equal conditions do not count.
    """
    count = len(base.pixels)
    clusters, conditions = clusters[:count], conditions[:count]
    chosen: dict[Partner, Index] = {
        "same noise": np.arange(count),
        "same cluster": partners(clusters, seed),
        "any": partners(np.zeros(count, dtype=np.int64), seed),
    }
    rows = []
    for name, other in others.items():
        for space in ("pixels", "features"):
            mine, theirs = getattr(base, space), getattr(other, space)
            same = correlations(mine, theirs[chosen["same noise"]])
            for partner, index in chosen.items():
                columns = ("mean", "deviation", "low", "high", "effect", "higher")
                row: dict[str, Any] = dict.fromkeys(columns)
                values = same
                if partner != "same noise":
                    values = correlations(mine, theirs[index])
                    values[(index < 0) | (conditions == conditions[index])] = np.nan
                    both = ~np.isnan(same) & ~np.isnan(values)
                    first, second = same[both], values[both]
                    if len(first) > 1:
                        # Cohen's d, and the share of samples where the same noise correlates more.
                        pooled = math.sqrt((first.var(ddof=1) + second.var(ddof=1)) / 2)
                        row["effect"] = finite((first.mean() - second.mean()) / pooled) if pooled else None
                        row["higher"] = float((first > second).mean())
                there = values[~np.isnan(values)]
                row["mean"] = finite(there.mean()) if len(there) else None
                if len(there) > 1:
                    mean, deviation = float(there.mean()), float(there.std(ddof=1))
                    half = Z95 * deviation / math.sqrt(len(there))
                    row |= {"deviation": deviation, "low": mean - half, "high": mean + half}
                rows.append(PairRow(strategy=name, space=space, partner=partner, pairs=len(there), **row))
    return rows
