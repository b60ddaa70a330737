"""Whether the experts that serve a state know it: errors by expert, cluster and time, and what follows.

Every row x0 of cluster j is noised once, with noise eps of its own, and everybody is asked at the same states
x_t = (1 - t) x0 + t eps. The **error** of a velocity v is the mean over dimensions of (v - (eps - x0))^2: the
loss of flow matching (DDM, eq. 6), in units of the latents squared. It holds what nobody can know of x0, the
same for all, so only differences mean something: over many rows, errors of two models differ as their
mean-square distances to the exact flow do. `own` is told the cluster, so it may lie below the exact mixture.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import TypeVar

import torch
from torch import Tensor

from atoll.campaign.diagnosed import DifferenceRow, DisagreementRow, ErrorRow, ExpertRow, MissingRow
from atoll.campaign.measured import Cluster, Time
from atoll.measure.moments import Means, Moments

MODELS = ("own", "selected", "others", "mixture", "monolith")
"""`own`: the expert of the row's cluster, as `oracle` takes it. `selected`: the one that the router finds
likeliest, as `top-1`. `others`: mean over those not selected. `mixture`: all, weighted by the router."""
GAPS = (
    ("selected", "own"),
    ("mixture", "own"),
    ("others", "selected"),
    ("selected", "monolith"),
    ("mixture", "monolith"),
    ("own", "monolith"),
)
"""Differences of errors, first less second, taken row by row, so their standard errors are those of pairs."""
Name = TypeVar("Name", str, int)


class Alignment:
    """Errors of experts, router's choices and monolith, collected batch by batch.

    Args:
        times: T times.
        k: number of clusters.
        present: numbers of the experts that exist, rising.
        monolith: whether there is one.
    """

    def __init__(self, times: Sequence[float], k: int, present: Sequence[int], monolith: bool) -> None:
        self.times, self.k, self.present = list(times), k, list(present)
        self.models = MODELS if monolith else MODELS[:-1]
        self.gaps = [pair for pair in GAPS if set(pair) <= set(self.models)]
        names = [*self.models, *(f"{a}-{b}" for a, b in self.gaps), "angle", "spread"]
        names += [f"expert {n}" for n in self.present] + [f"without {n}" for n in self.present]
        self._place = {name: number for number, name in enumerate(names)}
        self._below = [number for number, t in enumerate(self.times) if t < 1]
        self._means = Means(k, (len(self.times) + bool(self._below), len(names)))

    def add(
        self, velocities: Tensor, monolith: Tensor | None, target: Tensor, logits: Tensor, clusters: Tensor
    ) -> None:
        """One batch.

        Args:
            velocities: of the experts that exist `(P, T, B, D)`.
            monolith: its velocities `(T, B, D)`.
            target: eps - x0 `(B, D)`.
            logits: of the router `(T, B, K)`.
            clusters: of the rows `(B,)`.
        """
        known, rows = logits[..., self.present].double(), []
        for number in range(len(self.times)):
            each = self._at(velocities[:, number].double(), target.double(), known[number], clusters)
            if monolith is not None:
                each["monolith"] = (monolith[number].double() - target).square().mean(-1)
            each |= {f"{a}-{b}": each[a] - each[b] for a, b in self.gaps}
            rows.append(torch.stack([each[name] for name in self._place], -1))
        values = torch.stack(rows, 1)
        if self._below:
            values = torch.cat([values, values[:, self._below].mean(1, keepdim=True)], 1)
        self._means.add(values, clusters)

    def _at(self, v: Tensor, target: Tensor, logits: Tensor, clusters: Tensor) -> dict[str, Tensor]:
        """Values of rows `(B,)` at one time, from velocities `(P, B, D)` and logits `(B, P)`."""
        count, nan = len(self.present), torch.full(clusters.shape, torch.nan, dtype=torch.float64)
        away, weights = (v - target).transpose(0, 1), logits.softmax(-1)
        # The error of any mixture whose weights w sum to 1 is w' gram w.
        gram = away @ away.transpose(1, 2) / away.shape[-1]
        errors = gram.diagonal(dim1=1, dim2=2)
        chosen = errors.gather(1, weights.argmax(1, keepdim=True))[:, 0]
        mixture = torch.einsum("bp,bpq,bq->b", weights, gram, weights)
        # NaN for rows whose cluster has no expert.
        table = torch.full((self.k,), -1)
        table[self.present] = torch.arange(count)
        place = table[clusters]
        own_error = torch.where(place >= 0, errors.gather(1, place.clamp(min=0)[:, None])[:, 0], nan)
        each = {
            "own": own_error,
            "selected": chosen,
            "others": (errors.sum(1) - chosen) / (count - 1) if count > 1 else nan,
            "mixture": mixture,
            "angle": _angle(v) if count > 1 else nan,
            "spread": (weights * errors).sum(1) - mixture if count > 1 else nan,
        }
        for number, name in enumerate(self.present):
            each[f"expert {name}"] = errors[:, number]
            each[f"without {name}"] = _without(number, logits, gram) - mixture if count > 1 else nan
        return each

    def errors(self) -> list[ErrorRow]:
        """Error of every one of `MODELS` by time and cluster of the row."""
        return [
            ErrorRow(t=t, cluster=cluster, model=name, rows=rows, error=error, se=se)
            for t, cluster, name, (rows, error, se) in self._cells(self.models, "{}")
        ]

    def differences(self) -> list[DifferenceRow]:
        """Every one of `GAPS` by time and cluster."""
        names = [f"{a}-{b}" for a, b in self.gaps]
        return [
            DifferenceRow(t=t, cluster=cluster, gap=name, rows=rows, difference=difference, se=se)
            for t, cluster, name, (rows, difference, se) in self._cells(names, "{}")
        ]

    def experts(self) -> list[ExpertRow]:
        """Error of every expert on the rows of every cluster."""
        return [
            ExpertRow(t=t, cluster=cluster, expert=number, rows=rows, error=error, se=se)
            for t, cluster, number, (rows, error, se) in self._cells(self.present, "expert {}")
        ]

    def missing(self) -> list[MissingRow]:
        """What is lost without each expert."""
        return [
            MissingRow(t=t, cluster=cluster, expert=number, rows=rows, loss=loss, se=se)
            for t, cluster, number, (rows, loss, se) in self._cells(self.present, "without {}")
        ]

    def disagreement(self) -> list[DisagreementRow]:
        """How far experts differ at one state."""
        angles, spreads = self._cells(["angle"], "{}"), self._cells(["spread"], "{}")
        return [
            DisagreementRow(
                t=t, cluster=cluster, rows=rows, angle=angle, angle_se=angle_se, spread=spread, spread_se=se
            )
            for (t, cluster, _, (_, angle, angle_se)), (*_, (rows, spread, se)) in zip(
                angles, spreads, strict=True
            )
        ]

    def _cells(
        self, names: Sequence[Name], column: str
    ) -> Iterator[tuple[Time, Cluster, Name, tuple[int, float | None, float | None]]]:
        groups: list[tuple[Cluster, Moments]] = [("all", self._means.pooled(self.present))]
        groups += [(n, self._means.of(n)) for n in range(self.k)]
        times: list[Time] = [*self.times, *(["mean"] if self._below else [])]  # type: ignore[list-item]
        for number, t in enumerate(times):
            for cluster, moments in groups:
                for name in names:
                    yield t, cluster, name, moments.cells(number, self._place[column.format(name)])


def _without(number: int, logits: Tensor, gram: Tensor) -> Tensor:
    """Error of the mixture without one expert `(B,)`."""
    # Of logits, not of weights: where the router is sure of the missing one, the others' weights round to 0.
    left = logits.index_fill(1, torch.tensor([number]), -torch.inf).softmax(-1)
    return torch.einsum("bp,bpq,bq->b", left, gram, left)


def _angle(v: Tensor) -> Tensor:
    """Mean angle between the velocities `(P, B, D)` of two experts `(B,)`, in degrees."""
    unit = v / v.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
    # Kahan's formula: the arc cosine of a scalar product loses half the digits of small angles.
    pairs = [
        2 * torch.atan2((unit[a] - unit[b]).norm(dim=-1), (unit[a] + unit[b]).norm(dim=-1))
        for a, b in combinations(range(len(v)), 2)
    ]
    return torch.stack(pairs).mean(0).rad2deg()
