"""Why an ensemble is good or bad: its router and its experts, measured on rows with labels.

Rows come in batches and nothing is kept but sums. The noise of a row depends on the seed and the row's number
alone, and is the same at every time and for every model, so what is compared differs in nothing else.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.base.condition import Condition, Denoiser
from atoll.base.errors import DataError
from atoll.base.rng import generator, normals
from atoll.base.table import finite
from atoll.campaign.diagnosed import (
    DiagnosisTables,
    DifferenceRow,
    DisagreementRow,
    ErrorRow,
    ExpertRow,
    MissingRow,
    ReliabilityRow,
    RouterClusterRow,
    RouterRow,
)
from atoll.campaign.measured import Cluster, Time
from atoll.campaign.settings.measure import DiagnoseConfig
from atoll.data.columns import some_rows
from atoll.data.samples import Samples
from atoll.flow.objective import noisy
from atoll.flow.schedule import RectifiedFlow
from atoll.measure.metrics.projection import Means
from atoll.measure.shards import cut
from atoll.model.bank import Bank

TEMPERATURES = tuple(2 ** (i / 8) for i in range(-24, 25))
"""Tried for the router's best one: 1/8 to 8 in steps of an eighth of an octave."""
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
WEAK = 1.1
"""How much larger than another's an expert's error on its own cluster is to be warned of."""


@dataclass(frozen=True)
class Rows:
    """Some rows on the CPU: latents and noise `(B, C, H, W)`, conditions, clusters `(B,)`."""

    x0: Tensor
    cond: Condition
    eps: Tensor
    clusters: Tensor


def labelled(
    samples: Samples, clusters: NDArray[np.int64], most: int, seed: int, batch: int, numbers: range
) -> Iterator[Rows]:
    """These of at most so many of a split's samples, in batches, with clusters from all the data set's."""
    index = some_rows(np.arange(len(samples)), most, generator(seed, "diagnose-rows"))
    for part in (index[[*some]] for some in cut(numbers, batch)):
        rows, x0 = samples.rows[part], samples.latents(part)
        eps = normals(seed, "diagnose", rows.tolist(), x0.shape[1:])
        yield Rows(x0, samples.conditions(part), eps, torch.from_numpy(clusters[rows]))


@torch.inference_mode()
def answers_of(
    ensemble: Bank,
    monolith: Denoiser | None,
    rows: Iterable[Rows],
    k: int,
    config: DiagnoseConfig,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Of rows of known cluster the router's logits `(N, T, K)`, the errors (`Alignment.values`), the cluster.
    `DataError` where a model gives NaN or infinity."""
    router, alignment = ensemble.router, Alignment.of(ensemble.missing, monolith is not None, k, config)
    assert router is not None
    made = list[tuple[Tensor, Tensor, Tensor]]()
    for batch in rows:
        cond, states = batch.cond.to(device), list[tuple[Tensor, Tensor]]()
        for time in config.times:
            t = batch.x0.new_full((len(batch.x0),), time)
            states.append((noisy(batch.x0, batch.eps, t, RectifiedFlow()).to(device), t.to(device)))
        logits = torch.stack([router.logits(x, t, cond).double().cpu() for x, t in states])
        # Expert by expert, so that one of many on disk is brought once for all times of a batch.
        velocities = torch.stack(
            [_velocities(f"expert {n}", ensemble.experts[n], states, cond) for n in alignment.present]
        )
        base = None if monolith is None else _velocities("the monolith", monolith, states, cond)
        target = (batch.eps - batch.x0).flatten(1)
        table = alignment.values(velocities, base, target, logits, batch.clusters)
        made.append((logits.transpose(0, 1), table, batch.clusters))
    columns = map(torch.cat, zip(*made, strict=True))
    return dict(zip(("logits", "errors", "clusters"), columns, strict=True))


def errors_of(
    answers: Mapping[str, Tensor],
    missing: Collection[int],
    monolith: bool,
    prior: Sequence[int],
    config: DiagnoseConfig,
) -> dict[str, list[Any]]:
    """Tables of router and errors, out of `answers_of`; `prior` are the training rows of every cluster. The
    router is judged on all clusters; errors are those of experts that exist, with their logits only."""
    calibration = Calibration(config.times, torch.tensor(prior), config.bins)
    alignment = Alignment.of(missing, monolith, len(prior), config)
    for some in cut(range(len(answers["clusters"])), config.batch):
        logits, table, clusters = (
            answers[name][some.start : some.stop] for name in ("logits", "errors", "clusters")
        )
        calibration.add(logits.transpose(0, 1), clusters)
        alignment.means.add(table, clusters)
    return calibration.tables() | alignment.tables()


def _velocities(
    name: str, denoiser: Denoiser | None, states: Sequence[tuple[Tensor, Tensor]], cond: Condition
) -> Tensor:
    """Velocities of one denoiser `(T, B, D)`, float32."""
    assert denoiser is not None
    velocities = torch.stack([denoiser.velocity(x, t, cond).float().flatten(1).cpu() for x, t in states])
    if not velocities.isfinite().all():
        fix = "look at its losses; to train it again, remove run/ and expert/ first"
        raise DataError(f"{name} gives NaN or infinity", fix)
    return velocities


class Calibration:
    """How good the router's posterior is at every time, collected batch by batch.

    The router answers p(k | x_t, t, c). The exact mixture needs that very number and not only the right order
    (DDM, eq. 4), and `once` draws from it at t = 1, so calibration counts beside accuracy.

    `prior` is the share of every cluster in the training rows `(K,)`: what one knows without looking.
    """

    def __init__(self, times: Sequence[float], prior: Tensor, bins: int) -> None:
        self.times, self.prior, self.bins = list(times), prior.double() / prior.sum(), bins
        self.k = len(prior)
        self._rows = Means.zeros(self.k, len(times), 2)
        self._guesses = Means.zeros(self.k, 2)
        # Of every bin of confidence: rows, confidence, right answers, and their variance if calibrated.
        self._binned = torch.zeros(4, len(times), bins, dtype=torch.float64)
        self._tempered = torch.zeros(len(times), len(TEMPERATURES), dtype=torch.float64)

    def add(self, logits: Tensor, clusters: Tensor) -> None:
        """The logits `(T, B, K)` of rows of these clusters `(B,)`."""
        logp = logits.double().log_softmax(-1)
        index = clusters.expand(len(self.times), -1)[..., None]
        loss = -logp.gather(-1, index)[..., 0]
        confidence, answer = logp.exp().max(-1)
        right = (answer == clusters).double()
        self._rows.add(torch.stack([loss, right], -1).transpose(0, 1), clusters)
        guess = (clusters == self.prior.argmax()).double()
        self._guesses.add(torch.stack([-self.prior.log()[clusters], guess], -1), clusters)
        # Bins are (i / M, (i + 1) / M], so that an answer of certainty 1 is in the last one.
        bins = (confidence * self.bins).ceil().long().sub(1).clamp(0, self.bins - 1)
        parts = (torch.ones_like(confidence), confidence, right, confidence * (1 - confidence))
        for total, part in zip(self._binned, parts, strict=True):
            total.scatter_add_(1, bins, part)
        for number, temperature in enumerate(TEMPERATURES):
            cooled = (logits.double() / temperature).log_softmax(-1)
            self._tempered[:, number] -= cooled.gather(-1, index)[..., 0].sum(1)

    def tables(self) -> dict[str, list[Any]]:
        """Tables `router`, over all rows, `router_clusters`, and `reliability`, without empty bins."""
        whole, guesses = (means.pooled(range(self.k)) for means in (self._rows, self._guesses))
        entropy = -float(torch.special.xlogy(self.prior, self.prior).sum())
        tables: dict[str, list[Any]] = {"router": [], "router_clusters": [], "reliability": []}
        for number, t in enumerate(self.times):
            count, best = whole.cells(number, 0)[0], int(self._tempered[number].argmin())
            _, confidence, right, variance = self._binned[:, number]
            tables["router"].append(
                RouterRow(
                    t=t,
                    rows=count,
                    confidence=float(confidence.sum() / count),
                    ece=float((confidence - right).abs().sum() / count),
                    ece_chance=float((variance * 2 / math.pi).sqrt().sum() / count),
                    temperature=TEMPERATURES[best],
                    nll_tempered=finite(self._tempered[number, best] / count),
                    prior_nll=guesses.cells(0)[1],
                    prior_accuracy=guesses.cells(1)[1],
                    prior_entropy=entropy,
                    **whole.fields(["nll", "accuracy"], number),
                )
            )
            for cluster in range(self.k):
                means = self._rows.of(cluster)
                about: dict[str, Any] = {"t": t, "cluster": cluster, "rows": means.cells(number, 0)[0]}
                scores = means.fields(["nll", "accuracy"], number)
                tables["router_clusters"].append(RouterClusterRow(**about, **scores))
            for bucket, (count, confident, correct, _) in enumerate(self._binned[:, number].T.tolist()):
                if count:
                    ends: dict[str, Any] = {"low": bucket / self.bins, "high": (bucket + 1) / self.bins}
                    rates: dict[str, Any] = {"confidence": confident / count, "accuracy": correct / count}
                    tables["reliability"].append(ReliabilityRow(t=t, rows=int(count), **ends, **rates))
        return tables


class Alignment:
    """Whether the experts that serve a state know it: errors by expert, cluster and time, batch by batch.

    Every row x0 of cluster j is noised once, with noise eps of its own, and everybody is asked at the same
    states x_t = (1 - t) x0 + t eps. The **error** of a velocity v is the mean over dimensions of
    (v - (eps - x0))^2: the loss of flow matching (DDM, eq. 6), in units of the latents squared. It holds what
    nobody can know of x0, the same for all, so only differences mean something: over many rows, errors of two
    models differ as their mean-square distances to the exact flow do. `own` is told the cluster, so it may
    lie below the exact mixture.

    Of K clusters, the experts that are `present` answer at all of T times.
    """

    def __init__(self, times: Sequence[float], k: int, present: Sequence[int], monolith: bool) -> None:
        self.times, self.k, self.present = list(times), k, list(present)
        self.models = MODELS if monolith else MODELS[:-1]
        self.gaps = {f"{a}-{b}": (a, b) for a, b in GAPS if {a, b} <= set(self.models)}
        names = [*self.models, *self.gaps, "angle", "spread"]
        names += [f"expert {n}" for n in self.present] + [f"without {n}" for n in self.present]
        self._column = {name: number for number, name in enumerate(names)}
        # A mean over times leaves out t = 1, where there is only noise to see.
        self._below = [number for number, t in enumerate(self.times) if t < 1]
        self.means = Means.zeros(k, len(self.times) + bool(self._below), len(names))

    @classmethod
    def of(cls, missing: Collection[int], monolith: bool, k: int, config: DiagnoseConfig) -> "Alignment":
        """Of the experts that are not missing."""
        return cls(config.times, k, [n for n in range(k) if n not in missing], monolith)

    def values(
        self, velocities: Tensor, monolith: Tensor | None, target: Tensor, logits: Tensor, clusters: Tensor
    ) -> Tensor:
        """Of one batch `(B, T, columns)`, and their mean below t = 1.

        From velocities of the experts that exist `(P, T, B, D)` and of the monolith `(T, B, D)`, targets
        eps - x0 `(B, D)`, logits of the router `(T, B, K)`, clusters `(B,)`.
        """
        known, rows = logits[..., self.present].double(), []
        for number in range(len(self.times)):
            values = self._at(velocities[:, number].double(), target.double(), known[number], clusters)
            if monolith is not None:
                values["monolith"] = (monolith[number].double() - target).square().mean(-1)
            values |= {name: values[a] - values[b] for name, (a, b) in self.gaps.items()}
            rows.append(torch.stack([values[name] for name in self._column], -1))
        table = torch.stack(rows, 1)
        if self._below:
            table = torch.cat([table, table[:, self._below].mean(1, keepdim=True)], 1)
        return table

    def _at(self, v: Tensor, target: Tensor, logits: Tensor, clusters: Tensor) -> dict[str, Tensor]:
        """Values of rows `(B,)` at one time, from velocities `(P, B, D)` and logits `(B, P)`."""
        count, nan = len(self.present), torch.full(clusters.shape, torch.nan, dtype=torch.float64)
        away, weights = (v - target).transpose(0, 1), logits.softmax(-1)
        # The error of any mixture whose weights w sum to 1 is w' gram w: no mixture is computed.
        gram = away @ away.transpose(1, 2) / away.shape[-1]

        def error(weights: Tensor) -> Tensor:
            return torch.einsum("bp,bpq,bq->b", weights, gram, weights)

        errors, mixture = gram.diagonal(dim1=1, dim2=2), error(weights)
        selected = errors.gather(1, weights.argmax(1, keepdim=True))[:, 0]
        # NaN for rows whose cluster has no expert.
        column = torch.full((self.k,), -1)
        column[self.present] = torch.arange(count)
        own = column[clusters]
        values = {
            "own": torch.where(own >= 0, errors.gather(1, own.clamp(min=0)[:, None])[:, 0], nan),
            "selected": selected,
            "others": (errors.sum(1) - selected) / (count - 1) if count > 1 else nan,
            "mixture": mixture,
            "angle": _angle(v) if count > 1 else nan,
            "spread": (weights * errors).sum(1) - mixture if count > 1 else nan,
        }
        for number, name in enumerate(self.present):
            values[f"expert {name}"] = errors[:, number]
            # Of logits, not of weights: where the router is sure of who is missing, the others' round to 0.
            left = logits.index_fill(1, torch.tensor([number]), -torch.inf).softmax(-1)
            values[f"without {name}"] = error(left) - mixture if count > 1 else nan
        return values

    def tables(self) -> dict[str, list[Any]]:
        """Tables `errors`, `differences`, `experts`, `missing` and `disagreement`, by time and cluster."""
        groups: list[tuple[Cluster, Means]] = [("all", self.means.pooled(self.present))]
        groups += [(n, self.means.of(n)) for n in range(self.k)]
        times: list[Time] = [*self.times, *(["mean"] if self._below else [])]  # type: ignore[list-item]
        tables: dict[str, list[Any]] = {
            name: [] for name in ("errors", "differences", "experts", "missing", "disagreement")
        }
        for (number, t), (cluster, means) in product(enumerate(times), groups):
            place: dict[str, Any] = {"t": t, "cluster": cluster}
            cells = {name: means.cells(number, column) for name, column in self._column.items()}
            for model in self.models:
                rows, error, se = cells[model]
                tables["errors"].append(ErrorRow(**place, model=model, rows=rows, error=error, se=se))
            for gap in self.gaps:
                rows, apart, se = cells[gap]
                row = DifferenceRow(**place, gap=gap, rows=rows, difference=apart, se=se)
                tables["differences"].append(row)
            for n in self.present:
                rows, error, se = cells[f"expert {n}"]
                tables["experts"].append(ExpertRow(**place, expert=n, rows=rows, error=error, se=se))
                rows, loss, se = cells[f"without {n}"]
                tables["missing"].append(MissingRow(**place, expert=n, rows=rows, loss=loss, se=se))
            (_, angle, angle_se), (rows, spread, spread_se) = cells["angle"], cells["spread"]
            place |= {"angle": angle, "angle_se": angle_se, "spread": spread, "spread_se": spread_se}
            tables["disagreement"].append(DisagreementRow(**place, rows=rows))
        return tables


def _angle(v: Tensor) -> Tensor:
    """Mean angle between the velocities `(P, B, D)` of two experts `(B,)`, in degrees."""
    unit = v / v.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)
    # Kahan's formula: the arc cosine of a scalar product loses half the digits of small angles.
    pairs = [
        2 * torch.atan2((unit[a] - unit[b]).norm(dim=-1), (unit[a] + unit[b]).norm(dim=-1))
        for a, b in combinations(range(len(v)), 2)
    ]
    return torch.stack(pairs).mean(0).rad2deg()


def weak_experts(tables: DiagnosisTables, split: str) -> dict[int, tuple[float, float, str]]:
    """Experts that a neighbour, or the monolith, surpasses for sure on their own cluster: what a compromised
    island can do, and how it shows. By expert: its error, the lowest other one, and whose that is."""
    errors: dict[int, dict[str, tuple[float, float]]] = {}
    named: list[tuple[str, ExpertRow | ErrorRow]] = [
        *((f"expert {row.expert}", row) for row in tables.experts or ()),
        *((row.model, row) for row in tables.errors or () if row.model == "monolith"),
    ]
    for name, row in named:
        if (row.split, row.t) != (split, "mean") or row.cluster == "all":
            continue
        if row.error is not None and row.se is not None:
            errors.setdefault(row.cluster, {})[name] = row.error, row.se
    weak = {}
    for cluster, rivals in errors.items():
        error, se = rivals.pop(f"expert {cluster}", (0.0, 0.0))
        best = min(rivals, key=lambda name: rivals[name][0], default=None)
        # Three standard errors, so that chance among K experts does not accuse an honest island.
        if best is not None and error - 3 * se > WEAK * rivals[best][0]:
            weak[cluster] = (error, rivals[best][0], best)
    return weak
