"""What samples tell of an ensemble: who serves whom, how paths react to changes, where they end, copies.

Stable is not good: in arXiv 2602.02685 `full` is the stablest strategy and has the worst pictures. What
governs quality is that states meet experts which know them: errors at states (`labelled_rows`), and the
data-cluster distance of that paper, taken here at the end of the path, where a picture can be looked at.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from atoll.base.errors import DataError
from atoll.base.rng import normals
from atoll.base.table import finite
from atoll.campaign.diagnosed import (
    ClusterMatchRow,
    CopyRow,
    LipschitzRow,
    NearestRow,
    StabilityRow,
    SwitchRow,
    UsageRow,
)
from atoll.campaign.measured import Cluster
from atoll.data.cluster import Features, nearest_centroid, normalise
from atoll.measure.metrics.projection import Means, must_be_finite
from atoll.model.bank import Bank
from atoll.model.generate import Sampling, generate, samplers
from atoll.model.generation import Generation
from atoll.model.sampler import Sampler, times

NUDGE = 0.01
"""Root mean square of a nudge, per dimension; noise has 1. Large enough for networks in half precision."""


# Who serves whom, from the trace of a strategy.


def usage(weights: Float[Tensor, "S N K"], clusters: Tensor, sizes: Sequence[int]) -> list[UsageRow]:
    """How much every expert is used, by a trace from noise to data, the clusters `(N,)` of the rows whose
    conditions were sampled, and the training rows per cluster."""
    count, k = weights.shape[1:]
    means = Means.zeros(1, k, 2)
    means.add(torch.stack([weights.double().mean(0), weights[0].double()], -1))
    shares, used = torch.bincount(clusters, minlength=k) / count, means.of(0)
    return [
        UsageRow(
            expert=n,
            size=sizes[n] / sum(sizes),
            asked=float(shares[n]),
            first=used.cells(n, 1)[1],
            **used.fields(["used"], n),
        )
        for n in range(k)
    ]


def switches(weights: Float[Tensor, "S N K"], starts: Sequence[float]) -> list[SwitchRow]:
    """How often the leading expert changes at steps from S times on; nothing of a single step."""
    largest = weights.argmax(-1)
    changed = (largest[1:] != largest[:-1]).double()
    if not len(changed):
        return []
    means = Means.zeros(1, len(changed) + 1)
    means.add(torch.cat([changed, changed.mean(0, keepdim=True)]).T)
    ever = changed.cummax(0).values.mean(1).tolist()
    places: list[tuple[int, int | Literal["all"], float | None]] = [(-1, "all", None)]
    places += [(n, n + 1, starts[n + 1]) for n in range(len(changed))]
    rows = []
    for n, step, t in places:
        _, rate, se = means.of(0).cells(n)
        rows.append(SwitchRow(step=step, t=t, rate=rate, se=se, ever=ever[n]))
    return rows


def leaders(weights: NDArray[np.floating]) -> NDArray[np.int64]:
    """The expert of the largest weight over all steps `(N,)`, of weights `(S, N, K)`."""
    leader: NDArray[np.int64] = weights.mean(0).argmax(-1)
    return leader


# How a path reacts to small changes: of its state, its start and its steps.


def reactions(model: Bank, sampling: Sampling) -> dict[str, Tensor]:
    """Sample thrice: as asked, from nudged noise, and with twice the steps; the draws are the same.

    For each sample `changes` `(N, S, 2)`, how fast the field changes there at each step (`speeds`), and
    `gaps` `(N, 2)` of the ends: what a unit of nudge becomes, and the root mean square over dimensions that
    finer steps make. `DataError` for NaN.
    """
    first, count, generation = sampling.first, sampling.count, sampling.generation
    plain, starts = torch.zeros(count, *sampling.shape), torch.zeros(count, *sampling.shape)
    changes = torch.zeros(count, generation.steps, 2, dtype=torch.float64)
    for numbers, sampler in samplers(model, sampling):
        rows = [number - first for number in numbers]
        starts[rows] = sampler.x.cpu()
        with torch.inference_mode():
            steps = [speeds(sampler, generation.seed, numbers) for _ in range(generation.steps)]
        changes[rows] = torch.stack(steps, 1)
        plain[rows] = sampler.x.float().cpu()
    nudge = _nudge(generation.seed, "nudge", range(first, first + count), starts)
    # By number, as all that a sampling has: of those before the first nobody asks.
    noise = torch.cat([starts.new_zeros(first, *sampling.shape), starts + nudge])
    gaps = torch.zeros(count, 2, dtype=torch.float64)
    finer = replace(sampling, generation=generation.with_(steps=2 * generation.steps))
    for column, other in enumerate((replace(sampling, noise=noise), finer)):
        for drawn in generate(model, other):
            rows = [number - first for number in drawn.rows]
            gaps[rows, column] = _length(drawn.latents.float().cpu() - plain[rows])
    if not gaps.isfinite().all():
        fix = "look at the losses; to train an expert again, remove its run/ and expert/ first"
        raise DataError("sampling gives NaN or infinity", fix)
    gaps[:, 0] /= _length(nudge)
    gaps[:, 1] /= plain[0].numel() ** 0.5
    return {"changes": changes, "gaps": gaps}


def stability(
    reacted: Mapping[str, Tensor], generation: Generation, batch: int
) -> tuple[StabilityRow, list[LipschitzRow]]:
    """How the ends of paths react, and for each step how fast the field changes there, out of `reactions`."""
    paths, ends = Means.zeros(1, generation.steps, 2), Means.zeros(1, 2)
    # Batch by batch, as sums depend on their order.
    for rows in reacted["changes"].split(batch):
        paths.add(rows)
    ends.add(reacted["gaps"])
    count = len(reacted["gaps"])
    steady = StabilityRow(samples=count, **ends.of(0).fields(["sensitivity", "refinement"]))
    path = [
        LipschitzRow(step=n, t=t, samples=count, **paths.of(0).fields(["lipschitz", "foreseen"], n))
        for n, t in enumerate(times(generation.steps, generation.shift)[:-1])
    ]
    return steady, path


def speeds(sampler: Sampler, seed: int, numbers: Sequence[int]) -> Tensor:
    """Take a step, and find how fast the flow changes around the states at which it began.

    Returns:
        `(B, 2)`, along one random direction d: `|v(x + d) - v(x)| / |d|`, and the same of the picture that is
        foreseen, x - t v, since next to data all velocities change by 1 / t. Their squares are on average
        the mean squared singular value of the Jacobian: lower bounds of the local Lipschitz constants.
    """
    x, step = sampler.x, sampler.rows[0].step
    nudge = _nudge(seed, f"probe/{step}", numbers, x)
    sampler.advance()
    assert sampler.v is not None and sampler.t is not None
    # The step's own routing answers, not one for x + d: a change of expert is no property of the field.
    change = sampler.velocity(x + nudge, sampler.t) - sampler.v
    foreseen = nudge - sampler.t.view(-1, 1, 1, 1) * change
    return torch.stack([_length(change), _length(foreseen)], 1) / _length(nudge)[:, None]


def _nudge(seed: int, stream: str, rows: Sequence[int], like: Tensor) -> Tensor:
    return NUDGE * normals(seed, stream, list(rows), like.shape[1:]).to(like)


def _length(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x.double().flatten(1), dim=1)
    return length.cpu()


# Whether samples end where the experts that made them are at home: in the features that cut the clusters.


def cluster_match(
    features: NDArray[np.floating],
    weights: NDArray[np.floating],
    heldout: NDArray[np.floating],
    clusters: NDArray[np.int64],
    centroids: Features,
    prices: Features | None = None,
) -> list[ClusterMatchRow]:
    """Samples by the expert that served them most, beside held-out pictures of its cluster; `all` first.

    Args:
        features: of the samples `(N, D)`, by the partition's encoder.
        weights: of the trace `(S, N, K)`; their mean over the steps counts.
        heldout: features of held-out pictures `(M, D)`; none are fine.
        clusters: of the held-out pictures `(M,)`.
        centroids: of the partition `(K, D)`, like its `prices` `(K,)`.
    """
    k, served = len(centroids), leaders(weights)
    landed = nearest_centroid(normalise(features), centroids, prices) == served
    samples, real = Means.zeros(k, 3), Means.zeros(k, 2)
    columns = np.stack([landed, *_distances(features, centroids, weights.mean(0))], 1)
    samples.add(torch.from_numpy(columns), torch.from_numpy(served))
    if len(heldout):
        columns = np.stack(_distances(heldout, centroids, np.eye(k)[clusters]), 1)
        real.add(torch.from_numpy(columns), torch.from_numpy(clusters))
    numbers: list[Cluster] = ["all", *range(k)]
    rows = []
    for number in numbers:
        mine, theirs = (m.pooled(range(k)) if number == "all" else m.of(number) for m in (samples, real))
        values = mine.fields(["landed", "served", "others"])
        values |= theirs.fields(["own", "heldout_others"])
        counts: dict[str, Any] = {"samples": mine.cells(0)[0], "heldout": theirs.cells(0)[0]}
        rows.append(ClusterMatchRow(cluster=number, **counts, **values))
    return rows


def _distances(
    features: NDArray[np.floating], centroids: Features, weights: NDArray[np.floating]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distances to the centroids `(N,)`: weighted, and weighted by what the weights leave of 1."""
    points, places = torch.from_numpy(normalise(features)).double(), torch.from_numpy(centroids).double()
    apart, rest = torch.cdist(points, places).numpy(), 1 - weights
    left = rest.sum(1)
    # NaN where one expert has all the weight and there is no other.
    far = np.divide((apart * rest).sum(1), left, out=np.full(len(apart), np.nan), where=left > 0)
    return (apart * weights).sum(1), far


# Whether samples are copies of training pictures.
#
# In the features of an extractor, the distance of a sample to its nearest training picture is held against
# two things: the distance to the second nearest, since a copy is much nearer to one picture than to others (a
# sample counts as memorised below a ratio of 1/3 in Yoon et al. 2023, "Diffusion Probabilistic Models
# Generalize when They Fail to Memorize", and in arXiv 2310.02664), and what held-out pictures have, which
# nobody copied. Where training pictures come in near copies the ratio says nothing, and the distance does.

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
MEMORISED = 1 / 3
"""Ratio below which a sample counts as memorised in the literature."""
SAME = 1e-3
"""Distance below which two pictures are the same, as a part of the features' own size: features of columns
are stored in float16."""
_QUERIES = 1024


@dataclass(frozen=True)
class Nearest:
    """The two training pictures nearest to each of N pictures.

    Attributes:
        distances: Euclidean, `(N, 2)`, rising; the second is infinite where there is one training picture.
        rows: of the data set `(N, 2)`.
        scale: length of each picture's own features `(N,)`.
    """

    distances: F64
    rows: I64
    scale: F64

    @property
    def ratio(self) -> F64:
        """Nearest over second nearest `(N,)`; 0 for a copy, even of a picture that is there twice."""
        first, second = self.distances.T
        with np.errstate(divide="ignore", invalid="ignore"):
            quotient: F64 = np.where(self.same, 0.0, first / second)
        return quotient

    @property
    def same(self) -> NDArray[np.bool_]:
        """Whether the nearest is the very picture `(N,)`."""
        equal: NDArray[np.bool_] = self.distances[:, 0] <= SAME * self.scale
        return equal


def two_nearest(
    queries: NDArray[np.floating], reference: Iterable[tuple[I64, NDArray[np.floating]]]
) -> Nearest:
    """The two nearest to features `(N, D)` of a reference in parts, row numbers `(M,)` and features `(M, D)`
    each; `DataError` where it is empty, or a feature is NaN or infinite."""
    points = must_be_finite(queries)
    distances = np.full((len(points), 2), np.inf)
    rows = np.full((len(points), 2), -1, dtype=np.int64)
    seen = 0
    for numbers, features in reference:
        values = must_be_finite(features)
        seen += len(values)
        for first in range(0, len(points), _QUERIES):
            part = slice(first, first + _QUERIES)
            squared = (values**2).sum(1) - 2 * points[part] @ values.T
            few = np.argpartition(squared, min(1, len(values) - 1), axis=1)[:, :2]
            # The candidates' distances anew, without the cancellation that hides an exact copy.
            exact = np.linalg.norm(points[part][:, None] - values[few], axis=2)
            both, theirs = np.hstack([distances[part], exact]), np.hstack([rows[part], numbers[few]])
            order = np.argsort(both, axis=1, kind="stable")[:, :2]
            distances[part] = np.take_along_axis(both, order, 1)
            rows[part] = np.take_along_axis(theirs, order, 1)
    if not seen:
        raise DataError("there is no training picture to compare samples with", "ingest more rows")
    return Nearest(distances, rows, np.linalg.norm(points, axis=1))


@dataclass(frozen=True)
class Copies:
    """The nearest training pictures of samples and of held-out pictures, by cluster: that of the expert which
    served a sample most `(N,)`, and the held-out pictures' own `(M,)`. A `quantile` of those is the limit."""

    samples: Nearest
    heldout: Nearest
    served: I64
    clusters: I64
    quantile: float

    @property
    def limits(self) -> tuple[float, float] | None:
        """Ratio and distance that this quantile of the held-out pictures lie below.

        Those that are training pictures themselves are no measure and are left out; None if all are.
        """
        real = ~self.heldout.same
        if not real.any():
            return None
        measured = (self.heldout.ratio, self.heldout.distances[:, 0])
        ratio, distance = (float(np.quantile(values[real], self.quantile)) for values in measured)
        return ratio, distance

    def reasons(self) -> list[str]:
        """Why each sample is suspicious: `copy`, `ratio`, `distance`, several, or nothing."""
        ratio, distance = self.limits or (0.0, 0.0)
        tests = {
            "copy": self.samples.same,
            "ratio": self.samples.ratio < ratio,
            "distance": self.samples.distances[:, 0] < distance,
        }
        return [", ".join(n for n, hit in tests.items() if hit[i]) for i in range(len(self.served))]

    def by_cluster(self, k: int) -> list[NearestRow]:
        """Samples by the expert that served them, beside held-out pictures of that cluster; `all` first."""
        flagged = np.array([bool(reason) for reason in self.reasons()])
        clusters: list[Cluster] = ["all", *range(k)]
        rows = []
        for cluster in clusters:
            mine = np.full(len(self.served), True) if cluster == "all" else self.served == cluster
            real = np.full(len(self.clusters), True) if cluster == "all" else self.clusters == cluster
            values: dict[str, Any] = {
                "samples": int(mine.sum()),
                "suspicious": float(flagged[mine].mean()) if mine.any() else None,
                "heldout": int(real.sum()),
                "leaked": float(self.heldout.same[real].mean()) if real.any() else None,
            }
            # Held-out pictures that are training pictures themselves are no measure of what nobody copied.
            sides = (("", self.samples, mine), ("_heldout", self.heldout, real & ~self.heldout.same))
            for suffix, nearest, which in sides:
                ratio, distance = nearest.ratio[which], nearest.distances[which, 0]
                values |= {
                    f"memorised{suffix}": float((ratio < MEMORISED).mean()) if len(ratio) else None,
                    f"ratio{suffix}": finite(np.median(ratio)) if len(ratio) else None,
                    f"distance{suffix}": finite(np.median(distance)) if len(ratio) else None,
                }
            rows.append(NearestRow(cluster=cluster, **values))
        return rows

    def by_ratio(self) -> list[CopyRow]:
        """Every sample beside its nearest training row, nearest by ratio first; `why` may be empty."""
        reasons = self.reasons()
        order = np.lexsort((self.samples.distances[:, 0], self.samples.ratio))  # of equal ratios by distance
        return [
            CopyRow(
                sample=int(n),
                cluster=int(self.served[n]),
                row=int(self.samples.rows[n, 0]),
                ratio=finite(self.samples.ratio[n]),
                distance=finite(self.samples.distances[n, 0]),
                why=reasons[n],
            )
            for n in order
        ]

    def suspicious(self, most: int) -> list[CopyRow]:
        """The most suspicious samples."""
        return [row for row in self.by_ratio() if row.why][:most]

    def closest(self) -> list[CopyRow]:
        """Of every cluster whose expert served a sample the nearest one."""
        nearest = {row.cluster: row for row in reversed(self.by_ratio())}
        return [nearest[cluster] for cluster in sorted(nearest)]
