"""How a path from noise to data reacts to small changes: of its state, its start and its steps.

Stable is not good: in arXiv 2602.02685 `full` is the stablest strategy and has the worst pictures, while
what governs quality is that states meet experts which know them (`alignment`, `landing`). These numbers tell
one from the other.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from atoll.base.condition import Denoiser
from atoll.base.errors import DataError
from atoll.base.rng import normals
from atoll.campaign.results import Table
from atoll.measure.diagnosis.running_stats import Means
from atoll.measure.table import Cell
from atoll.model.ensemble import Ensemble
from atoll.model.field import Field
from atoll.model.generate import Sampling, generate
from atoll.model.integrate import scheduler_of

NUDGE = 0.01
"""Root mean square of a nudge, per dimension; noise has 1. Large enough for networks in half precision."""


class Probe:
    """A field that also finds how fast it changes around the states that it is asked at.

    The routing is held: an ensemble asks its router once per step, with the state itself.

    Args:
        field: followed by a sampler.
        seed: of the directions.
        rows: numbers of the samples `(B,)`.

    Attributes:
        found: of each step `(B, 2)`, along one random direction d: `|v(x + d) - v(x)| / |d|`, and the same of
            the picture that is foreseen, x - t v, since next to data all velocities change by 1 / t. Their
            squares are on average the mean squared singular value of the Jacobian, so they are lower bounds
            of the local Lipschitz constants.
    """

    def __init__(self, field: Field, seed: int, rows: Sequence[int]) -> None:
        self.field, self.seed, self.rows = field, seed, list(rows)
        self.values: list[Tensor] = []

    def __call__(self, x_t: Tensor, t: float, step: int) -> Tensor:
        """The field's own velocity."""
        nudge = _nudge(self.seed, f"probe/{step}", self.rows, x_t)
        v = self.field(x_t, t, step)
        change = self.field(x_t + nudge, t, step) - v
        self.values.append(torch.stack([_size(change), _size(nudge - t * change)], 1) / _size(nudge)[:, None])
        return v


def stability(model: Ensemble | Denoiser, sampling: Sampling) -> tuple[Table, Table]:
    """Sample thrice: as asked, from nudged noise, and with twice the steps; the draws are the same.

    Args:
        model: experts and router, or one denoiser.
        sampling: of how many, and how.

    Returns:
        `stability`, one row. sensitivity: how much farther the ends of a sample and of its nudged twin are
        apart than their starts were, where a change of expert counts. refinement: root mean square of what
        twice the steps change in it, in units of the latents.
        `lipschitz`, a row for each step. lipschitz: of the velocity, foreseen: of the picture; see `Probe`.
        Both have the mean over samples and its standard error.

    Raises:
        DataError: the model gives NaN or infinity.
    """
    probes: dict[int, Probe] = {}

    def probed(field: Field, rows: Sequence[int]) -> Field:
        probes[rows[0]] = Probe(field, sampling.generation.seed, rows)
        return probes[rows[0]]

    def nudge(rows: Sequence[int], like: Tensor) -> Tensor:
        return _nudge(sampling.generation.seed, "nudge", rows, like)

    def nudged(rows: Sequence[int]) -> Tensor:
        starts = sampling.starts(rows)
        return starts + nudge(rows, starts)

    count, generation = sampling.count, sampling.generation
    paths, ends = Means(1, (generation.steps, 2)), Means(1, (2,))
    plain = torch.empty(count, *sampling.shape)
    for drawn in generate(model, replace(sampling, around=probed)):
        plain[drawn.rows] = drawn.latents.float().cpu()
        speeds = torch.stack(probes.pop(drawn.rows[0]).values, 1)
        paths.add(speeds, torch.zeros(len(drawn.rows)).long())
    gaps = torch.empty(count, 2, dtype=torch.float64)
    finer = replace(sampling, generation=generation.with_(steps=2 * generation.steps))
    for column, other in enumerate((replace(sampling, noise=nudged), finer)):
        for drawn in generate(model, other):
            apart = drawn.latents.float().cpu() - plain[drawn.rows]
            gaps[drawn.rows, column] = _size(apart)
    if not gaps.isfinite().all():
        raise DataError("sampling gives NaN or infinity", "look at the losses, and train it again")
    start = _size(nudge(range(count), plain))
    gaps[:, 0] /= start
    gaps[:, 1] /= plain[0].numel() ** 0.5
    ends.add(gaps, torch.zeros(count).long())
    whole, steps = ends.of(0), paths.of(0)
    line: list[Cell] = [*whole.cells(0), *whole.cells(1)[1:]]
    times = [float(t) for t in scheduler_of(generation).sigmas[:-1]]
    return (
        Table.of(("samples", "sensitivity", "sensitivity_se", "refinement", "refinement_se"), [line]),
        Table.of(
            ("step", "t", "samples", "lipschitz", "lipschitz_se", "foreseen", "foreseen_se"),
            [[n, t, *steps.cells(n, 0), *steps.cells(n, 1)[1:]] for n, t in enumerate(times)],
        ),
    )


def _nudge(seed: int, stream: str, rows: Sequence[int], like: Tensor) -> Tensor:
    return NUDGE * normals(seed, stream, list(rows), like.shape[1:]).to(like)


def _size(x: Tensor) -> Tensor:
    """Length of each sample `(B,)`, float64 on the CPU."""
    size: Tensor = torch.linalg.vector_norm(x.double().flatten(1), dim=1)
    return size.cpu()
