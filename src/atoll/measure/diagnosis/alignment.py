"""Whether the experts that serve a state know it: errors by expert, cluster and time, and what follows.

Every row x0 of cluster j is noised once, with noise eps of its own, and everybody is asked at the same states
x_t = (1 - t) x0 + t eps. The **error** of a velocity v is the mean over dimensions of (v - (eps - x0))^2: the
loss of flow matching (DDM, eq. 6), in units of the latents squared. It holds what nobody can know of x0, the
same for all, so only differences mean something: over many rows, errors of two models differ as their
mean-square distances to the exact flow do. `own` is told the cluster, so it may lie below the exact mixture.
"""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from atoll.campaign.results import Table
from atoll.measure.diagnosis.running_stats import Means, Moments
from atoll.measure.table import Cell

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
MEAN = "mean"
"""In place of a time: the mean over the times below 1 of each row."""
ALL = "all"
"""In place of a cluster: all rows whose cluster has an expert."""


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

    def errors(self) -> Table:
        """Error of every one of `MODELS` by time and cluster of the row, with the rows and standard error."""
        return self._table("model", [(name, name) for name in self.models], "error")

    def differences(self) -> Table:
        """Every one of `GAPS` by time and cluster. `selected-own` is what the router's choice costs against
        being told the cluster; below 0 in `selected-monolith` the ensemble wins."""
        return self._table("gap", [(f"{a}-{b}", f"{a}-{b}") for a, b in self.gaps], "difference")

    def experts(self) -> Table:
        """Error of every expert on the rows of every cluster: lowest on its own where experts specialise
        (expert-data alignment, arXiv 2602.02685)."""
        return self._table("expert", [(n, f"expert {n}") for n in self.present], "error")

    def missing(self) -> Table:
        """What is lost without an expert: the mixture's error when the expert's weight is shared out among
        the others in proportion to theirs, less the whole mixture's. Nothing is sampled."""
        return self._table("expert", [(n, f"without {n}") for n in self.present], "loss")

    def disagreement(self) -> Table:
        """How far experts differ at one state. angle: between the velocities of two experts, in degrees, mean
        over all pairs (arXiv 2602.02685). spread: mean-square distance of an expert drawn by the router's
        weights to the mixture, that is, the error of drawing less that of mixing (ambiguity; Krogh and
        Vedelsby 1995)."""
        both = self._table("what", [(name, name) for name in ("angle", "spread")], "value").rows
        columns = ("t", "cluster", "rows", "angle", "angle_se", "spread", "spread_se")
        rows: list[list[Cell]] = [
            [a[0], a[1], *a[3:], *b[4:]]
            for a, b in zip(both[::2], both[1::2], strict=True)
            if a[2] == "angle"
        ]
        return Table.of(columns, rows)

    def _table(self, kind: str, names: Sequence[tuple[Cell, str]], value: str) -> Table:
        rows: list[list[Cell]] = []
        groups: list[tuple[Cell, Moments]] = [(ALL, self._means.pooled(self.present))]
        groups += [(n, self._means.of(n)) for n in range(self.k)]
        times: list[Cell] = [*self.times, *([MEAN] if self._below else [])]
        for number, t in enumerate(times):
            for cluster, moments in groups:
                for name, column in names:
                    rows.append([t, cluster, name, *moments.cells(number, self._place[column])])
        return Table.of(("t", "cluster", kind, "rows", value, "se"), rows)


def _without(number: int, logits: Tensor, gram: Tensor) -> Tensor:
    """Error of the mixture without one expert `(B,)`."""
    # Of logits, not of weights: where the router is sure of the missing one, the others' weights round to 0.
    left = logits.index_fill(1, torch.tensor([number]), -torch.inf).softmax(-1)
    return torch.einsum("bp,bpq,bq->b", left, gram, left)


def _angle(v: Tensor) -> Tensor:
    """Mean angle between the velocities `(P, B, D)` of two experts `(B,)`, in degrees."""
    unit = v / v.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
    pairs = [_between(unit[a], unit[b]) for a, b in combinations(range(len(v)), 2)]
    return torch.stack(pairs).mean(0).rad2deg()


def _between(a: Tensor, b: Tensor) -> Tensor:
    """The angle of unit vectors `(B, D)`, sharp for small ones too (Kahan)."""
    return 2 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))
