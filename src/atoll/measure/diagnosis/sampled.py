"""What samples tell of an ensemble: who serves whom, how paths react to small changes, where they end.

Stable is not good: in arXiv 2602.02685 `full` is the stablest strategy and has the worst pictures. What
governs quality is that states meet experts which know them: errors at states (`labelled_rows`), and the
data-cluster distance of that paper, taken here at the end of the path, where a picture can be looked at.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from atoll.base.errors import DataError
from atoll.base.rng import normals
from atoll.campaign.diagnosed import ClusterMatchRow, LipschitzRow, StabilityRow, SwitchRow, UsageRow
from atoll.campaign.measured import Cluster
from atoll.data.cluster import Features, nearest_centroid, normalise
from atoll.measure.moments import Means
from atoll.model.bank import Bank
from atoll.model.generate import Sampling, generate, samplers
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


def stability(model: Bank, sampling: Sampling) -> tuple[StabilityRow, list[LipschitzRow]]:
    """Sample thrice: as asked, from nudged noise, and with twice the steps; the draws are the same.

    Returns:
        How the ends react, and for each step how fast the field changes there; see `speeds`.

    Raises:
        DataError: the model gives NaN or infinity.
    """
    count, generation = sampling.count, sampling.generation
    paths, ends = Means.zeros(1, generation.steps, 2), Means.zeros(1, 2)
    plain, starts = torch.empty(count, *sampling.shape), torch.empty(count, *sampling.shape)
    for numbers, sampler in samplers(model, sampling):
        starts[numbers] = sampler.x.cpu()
        changes = []
        with torch.inference_mode():
            while not sampler.done:
                changes.append(speeds(sampler, generation.seed, numbers))
        plain[numbers] = sampler.x.float().cpu()
        paths.add(torch.stack(changes, 1))
    nudge = _nudge(generation.seed, "nudge", range(count), starts)
    gaps = torch.empty(count, 2, dtype=torch.float64)
    finer = replace(sampling, generation=generation.with_(steps=2 * generation.steps))
    for column, other in enumerate((replace(sampling, noise=starts + nudge), finer)):
        for drawn in generate(model, other):
            gaps[drawn.rows, column] = _length(drawn.latents.float().cpu() - plain[drawn.rows])
    if not gaps.isfinite().all():
        raise DataError("sampling gives NaN or infinity", "look at the losses, and train it again")
    # Of the nudged end what a unit of nudge becomes; of finer steps the root mean square over dimensions.
    gaps[:, 0] /= _length(nudge)
    gaps[:, 1] /= plain[0].numel() ** 0.5
    ends.add(gaps)
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
