"""How a path from noise to data reacts to small changes: of its state, its start and its steps.

Stable is not good: in arXiv 2602.02685 `full` is the stablest strategy and has the worst pictures, while
what governs quality is that states meet experts which know them (`alignment`, `cluster_match`). These numbers
tell one from the other.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from atoll.base.errors import DataError
from atoll.base.rng import normals
from atoll.campaign.diagnosed import LipschitzRow, StabilityRow
from atoll.measure.moments import Means
from atoll.model.bank import Bank
from atoll.model.generate import Sampling, generate, samplers
from atoll.model.sampler import Sampler, times

NUDGE = 0.01
"""Root mean square of a nudge, per dimension; noise has 1. Large enough for networks in half precision."""


def stability(model: Bank, sampling: Sampling) -> tuple[StabilityRow, list[LipschitzRow]]:
    """Sample thrice: as asked, from nudged noise, and with twice the steps; the draws are the same.

    Args:
        model: experts and router, or one network.
        sampling: of how many from the first, and how.

    Returns:
        How the ends react, and for each step how fast the field changes there; see `speeds`.

    Raises:
        DataError: the model gives NaN or infinity.
    """
    count, generation = sampling.count, sampling.generation
    paths, ends = Means(1, (generation.steps, 2)), Means(1, (2,))
    plain, starts = torch.empty(count, *sampling.shape), torch.empty(count, *sampling.shape)
    for numbers, sampler in samplers(model, sampling):
        starts[numbers] = sampler.x.cpu()
        changes = []
        with torch.inference_mode():
            while not sampler.done:
                changes.append(speeds(sampler, generation.seed, numbers))
        plain[numbers] = sampler.x.float().cpu()
        paths.add(torch.stack(changes, 1), torch.zeros(len(numbers)).long())
    nudge = _nudge(generation.seed, "nudge", range(count), starts)
    gaps = torch.empty(count, 2, dtype=torch.float64)
    finer = replace(sampling, generation=generation.with_(steps=2 * generation.steps))
    for column, other in enumerate((replace(sampling, noise=starts + nudge), finer)):
        for drawn in generate(model, other):
            apart = drawn.latents.float().cpu() - plain[drawn.rows]
            gaps[drawn.rows, column] = _size(apart)
    if not gaps.isfinite().all():
        raise DataError("sampling gives NaN or infinity", "look at the losses, and train it again")
    gaps[:, 0] /= _size(nudge)
    gaps[:, 1] /= plain[0].numel() ** 0.5
    ends.add(gaps, torch.zeros(count).long())
    samples, sensitivity, sensitivity_se = ends.of(0).cells(0)
    _, refinement, refinement_se = ends.of(0).cells(1)
    path = []
    for n, t in enumerate(times(generation.steps, generation.shift)[:-1]):
        _, lipschitz, lipschitz_se = paths.of(0).cells(n, 0)
        _, foreseen, foreseen_se = paths.of(0).cells(n, 1)
        path.append(
            LipschitzRow(
                step=n,
                t=t,
                samples=samples,
                lipschitz=lipschitz,
                lipschitz_se=lipschitz_se,
                foreseen=foreseen,
                foreseen_se=foreseen_se,
            )
        )
    return (
        StabilityRow(
            samples=samples,
            sensitivity=sensitivity,
            sensitivity_se=sensitivity_se,
            refinement=refinement,
            refinement_se=refinement_se,
        ),
        path,
    )


def speeds(sampler: Sampler, seed: int, numbers: Sequence[int]) -> Tensor:
    """Take a step, and find how fast the flow changes around the states at which it began.

    The routing is held: an ensemble asks its router once in a step, with the state itself.

    Args:
        sampler: a batch in flight.
        seed: of the directions.
        numbers: of the samples `(B,)`.

    Returns:
        `(B, 2)`, along one random direction d: `|v(x + d) - v(x)| / |d|`, and the same of the picture that is
        foreseen, x - t v, since next to data all velocities change by 1 / t. Their squares are on average
        the mean squared singular value of the Jacobian: lower bounds of the local Lipschitz constants.
    """
    x, step = sampler.x, sampler.rows[0].step
    nudge = _nudge(seed, f"probe/{step}", numbers, x)
    sampler.advance()
    assert sampler.v is not None and sampler.t is not None
    change = sampler.velocity(x + nudge, sampler.t) - sampler.v
    foreseen = nudge - sampler.t.view(-1, 1, 1, 1) * change
    return torch.stack([_size(change), _size(foreseen)], 1) / _size(nudge)[:, None]


def _nudge(seed: int, stream: str, rows: Sequence[int], like: Tensor) -> Tensor:
    return NUDGE * normals(seed, stream, list(rows), like.shape[1:]).to(like)


def _size(x: Tensor) -> Tensor:
    """Length of each sample `(B,)`, float64 on the CPU."""
    size: Tensor = torch.linalg.vector_norm(x.double().flatten(1), dim=1)
    return size.cpu()
