"""Why an ensemble is good or bad: the router, the experts, and who serves whom, measured on rows with labels.

Rows come in batches and nothing is kept but sums. The noise of a row depends on the seed and the row's number
alone, and is the same at every time and for every model, so what is compared differs in nothing else.
`calibration` and `alignment` define every number and name its source.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atoll.base.condition import Condition, Denoiser
from atoll.base.errors import DataError
from atoll.base.rng import generator, normals
from atoll.campaign.diagnosed import DiagnosisTables, ErrorRow, ExpertRow
from atoll.campaign.settings.measure import DiagnoseConfig
from atoll.data.samples import Samples
from atoll.flow.objective import noisy
from atoll.flow.schedule import RectifiedFlow
from atoll.measure.diagnosis.alignment import Alignment
from atoll.measure.diagnosis.calibration import Calibration
from atoll.model.bank import Bank


@dataclass(frozen=True)
class Rows:
    """Some rows with their noise, on the CPU.

    Attributes:
        x0: latents `(B, C, H, W)`.
        cond: conditions.
        eps: noise like `x0`.
        clusters: of the rows `(B,)`.
    """

    x0: Tensor
    cond: Condition
    eps: Tensor
    clusters: Tensor


def labelled(
    samples: Samples, clusters: NDArray[np.int64], most: int, seed: int, batch: int
) -> Iterator[Rows]:
    """At most so many of these samples with clusters and noise, batch by batch.

    Args:
        samples: of one split.
        clusters: of every row of the data set.
        most: rows to take.
        seed: of their choice and of the noise.
        batch: rows at once.
    """
    index = chosen(len(samples), most, seed)
    for first in range(0, len(index), batch):
        part = index[first : first + batch]
        rows, x0 = samples.rows[part], samples.latents(part)
        eps = normals(seed, "diagnose", rows.tolist(), x0.shape[1:])
        yield Rows(x0, samples.conditions(part), eps, torch.from_numpy(clusters[rows]))


def chosen(rows: int, most: int, seed: int) -> NDArray[np.int64]:
    """Numbers of at most so many of these rows, rising."""
    order = torch.randperm(rows, generator=generator(seed, "diagnose-rows")).numpy()
    return np.sort(order[:most]).astype(np.int64)


@torch.inference_mode()
def measure(
    ensemble: Bank,
    monolith: Denoiser | None,
    rows: Iterable[Rows],
    prior: Sequence[int],
    config: DiagnoseConfig,
    device: torch.device | str = "cpu",
) -> dict[str, list[Any]]:
    """Router and errors on rows of known cluster.

    Args:
        ensemble: experts and router. The router is judged on all clusters; errors are those of the experts
            that exist, with their logits only.
        monolith: the baseline, or None.
        rows: batches.
        prior: training rows of every cluster.
        config: times and bins.
        device: where the models are.

    Returns:
        Tables `router`, `router_clusters`, `reliability`, `errors`, `differences`, `experts`, `missing`,
        `disagreement`.
    """
    k, router = len(prior), ensemble.router
    assert router is not None
    present = [n for n in range(k) if n not in ensemble.missing]
    calibration = Calibration(config.times, torch.tensor(prior), config.bins)
    alignment = Alignment(config.times, k, present, monolith is not None)
    for batch in rows:
        states, cond = _states(batch, config.times, device), batch.cond.to(device)
        logits = torch.stack([router.logits(x, t, cond).double().cpu() for x, t in states])
        calibration.add(logits, batch.clusters)
        # Expert by expert, so that one of many on disk is brought once for all times of a batch.
        velocities = torch.stack(
            [_velocities(f"expert {n}", ensemble.experts[n], states, cond) for n in present]
        )
        base = None if monolith is None else _velocities("the monolith", monolith, states, cond)
        alignment.add(velocities, base, (batch.eps - batch.x0).flatten(1), logits, batch.clusters)
    return {
        "router": calibration.by_time(),
        "router_clusters": calibration.by_cluster(),
        "reliability": calibration.reliability(),
        "errors": alignment.errors(),
        "differences": alignment.differences(),
        "experts": alignment.experts(),
        "missing": alignment.missing(),
        "disagreement": alignment.disagreement(),
    }


def _states(batch: Rows, times: Sequence[float], device: torch.device | str) -> list[tuple[Tensor, Tensor]]:
    states = []
    for time in times:
        t = batch.x0.new_full((len(batch.x0),), time)
        states.append((noisy(batch.x0, batch.eps, t, RectifiedFlow()).to(device), t.to(device)))
    return states


def _velocities(
    name: str, denoiser: Denoiser | None, states: Sequence[tuple[Tensor, Tensor]], cond: Condition
) -> Tensor:
    """Velocities of one denoiser `(T, B, D)`, float32."""
    assert denoiser is not None
    velocities = torch.stack([denoiser.velocity(x, t, cond).float().flatten(1).cpu() for x, t in states])
    if not velocities.isfinite().all():
        raise DataError(f"{name} gives NaN or infinity", "look at its losses, and train it again")
    return velocities


WEAK = 1.1
"""How much larger than another's an expert's error on its own cluster is to be warned of."""


def weak_experts(tables: DiagnosisTables, split: str) -> dict[int, tuple[float, float, str]]:
    """Experts that a neighbour, or the monolith, surpasses for sure on their own cluster: what a compromised
    island can do, and how it shows.

    Returns:
        By expert: its error, the lowest other one, and whose that is.
    """
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
    result = {}
    for cluster, rivals in errors.items():
        error, se = rivals.pop(f"expert {cluster}", (0.0, 0.0))
        best = min(rivals, key=lambda name: rivals[name][0], default=None)
        # Three standard errors, so that chance among K experts does not accuse an honest island.
        if best is not None and error - 3 * se > WEAK * rivals[best][0]:
            result[cluster] = (error, rivals[best][0], best)
    return result
