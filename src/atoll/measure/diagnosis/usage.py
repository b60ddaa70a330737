"""Who serves whom while sampling: from the traces of a strategy."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.campaign.results import Table
from atoll.measure.diagnosis.running_stats import Means
from atoll.measure.table import Cell


def usage(weights: Float[Tensor, "S N K"], clusters: Tensor, sizes: Sequence[int]) -> Table:
    """How much every expert is used.

    used: mean weight over samples and steps, used_se its standard error over samples. first: the same at the
    first step, next to pure noise. asked: share of the samples whose condition comes from a row of this
    cluster, what a router that knows all would come to. size: share of the training rows.

    Args:
        weights: of a trace, from noise to data.
        clusters: of the rows whose conditions were sampled `(N,)`.
        sizes: training rows per cluster.
    """
    count, k = weights.shape[1:]
    means = Means(1, (2, k))
    means.add(torch.stack([weights.double().mean(0), weights[0].double()], 1), torch.zeros(count).long())
    shares = torch.bincount(clusters, minlength=k) / count
    moments, total = means.of(0), sum(sizes)
    rows: list[list[Cell]] = [
        [n, sizes[n] / total, float(shares[n]), *moments.cells(0, n)[1:], moments.cells(1, n)[1]]
        for n in range(k)
    ]
    return Table.of(("expert", "size", "asked", "used", "used_se", "first"), rows)


def switched(weights: Float[Tensor, "S N K"]) -> Tensor:
    """Whether the expert of the largest weight changes from each step to the next, bool `(S - 1, N)`."""
    leaders = weights.argmax(-1)
    return leaders[1:] != leaders[:-1]


def switches(weights: Float[Tensor, "S N K"], times: Sequence[float]) -> Table:
    """How often the leading expert changes along a trajectory.

    step and t: where the new expert takes over; `all` is the switch rate of the whole trajectory, the share
    of the S - 1 passages with a change. rate: mean over samples, se its standard error over samples.
    ever: share of the samples that change by then at least once.

    Args:
        weights: of a trace, from noise to data.
        times: S times of its steps.
    """
    changed = switched(weights).double()
    count = changed.shape[1]
    rows: list[list[Cell]] = []
    if len(changed):
        means = Means(1, (len(changed) + 1,))
        means.add(torch.cat([changed, changed.mean(0, keepdim=True)]).T, torch.zeros(count).long())
        ever = changed.cummax(0).values.mean(1).tolist()
        pooled = means.of(0)
        rows.append(["all", None, *pooled.cells(len(changed))[1:], ever[-1]])
        rows += [[n + 1, times[n + 1], *pooled.cells(n)[1:], ever[n]] for n in range(len(changed))]
    return Table.of(("step", "t", "rate", "se", "ever"), rows)
