"""Who serves whom while sampling: from the traces of a strategy."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.campaign.diagnosed import SwitchRow, UsageRow
from atoll.measure.moments import Means


def usage(weights: Float[Tensor, "S N K"], clusters: Tensor, sizes: Sequence[int]) -> list[UsageRow]:
    """How much every expert is used.

    Args:
        weights: of a trace, from noise to data.
        clusters: of the rows whose conditions were sampled `(N,)`.
        sizes: training rows per cluster.
    """
    count, k = weights.shape[1:]
    means = Means(1, (2, k))
    means.add(torch.stack([weights.double().mean(0), weights[0].double()], 1), torch.zeros(count).long())
    shares = torch.bincount(clusters, minlength=k) / count
    moments, total, rows = means.of(0), sum(sizes), []
    for n in range(k):
        _, used, used_se = moments.cells(0, n)
        first = moments.cells(1, n)[1]
        asked = float(shares[n])
        rows.append(
            UsageRow(expert=n, size=sizes[n] / total, asked=asked, used=used, used_se=used_se, first=first)
        )
    return rows


def switched(weights: Float[Tensor, "S N K"]) -> Tensor:
    """Whether the expert of the largest weight changes from each step to the next, bool `(S - 1, N)`."""
    leaders = weights.argmax(-1)
    return leaders[1:] != leaders[:-1]


def switches(weights: Float[Tensor, "S N K"], times: Sequence[float]) -> list[SwitchRow]:
    """How often the leading expert changes along a trajectory; nothing of a single step.

    Args:
        weights: of a trace, from noise to data.
        times: S times of its steps.
    """
    changed = switched(weights).double()
    if not len(changed):
        return []
    means = Means(1, (len(changed) + 1,))
    means.add(torch.cat([changed, changed.mean(0, keepdim=True)]).T, torch.zeros(changed.shape[1]).long())
    ever = changed.cummax(0).values.mean(1).tolist()
    _, rate, se = means.of(0).cells(len(changed))
    rows = [SwitchRow(step="all", t=None, rate=rate, se=se, ever=ever[-1])]
    for n in range(len(changed)):
        _, rate, se = means.of(0).cells(n)
        rows.append(SwitchRow(step=n + 1, t=times[n + 1], rate=rate, se=se, ever=ever[n]))
    return rows
