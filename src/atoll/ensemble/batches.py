"""Any number of samples in batches; where experts are known from the start, ordered by expert."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from atoll.base.condition import Condition, Denoiser
from atoll.ensemble.dispatch import Expecting
from atoll.ensemble.ensemble import Ensemble, Field, SingleField, Trace
from atoll.ensemble.routing import Routing
from atoll.ensemble.sample import flow_scheduler, sample, starting_noise


@dataclass(frozen=True)
class Sampling:
    """How samples are drawn.

    Attributes:
        routing: strategy.
        guidance: classifier-free guidance scale; 1 is none.
        steps: Euler steps.
        seed: of noise and routing.
        shape: of a latent, (C, H, W).
        batch: most samples at once; it does not change them.
        device: where sampling happens.
        first: number of the first sample; those before it are somebody else's.
    """

    routing: Routing
    guidance: float
    steps: int
    seed: int
    shape: tuple[int, int, int]
    batch: int
    device: torch.device | str = "cpu"
    first: int = 0

    def noise(self, rows: Sequence[int]) -> Float[Tensor, "B C H W"]:
        """What these samples start from."""
        return starting_noise(self.seed, rows, self.shape).to(self.device)

    def batches(self, count: int) -> list[list[int]]:
        """The `count` samples from `first` on in batches, in order."""
        firsts, end = range(self.first, self.first + count, self.batch), self.first + count
        return [list(range(first, min(first + self.batch, end))) for first in firsts]


@dataclass(frozen=True)
class Drawn:
    """One batch of samples.

    Attributes:
        rows: numbers of the samples.
        latents: `(B, C, H, W)`.
        trace: who served them; None for a single denoiser.
    """

    rows: list[int]
    latents: Tensor
    trace: Trace | None


Conditions = Callable[[Sequence[int]], Condition]
"""Conditions of samples by number, on the sampling device."""


def sample_batches(
    model: Ensemble | Denoiser,
    conditions: Conditions,
    null: Condition,
    count: int,
    sampling: Sampling,
    labels: Int[Tensor, "N"] | None = None,
    around: Callable[[Field, Sequence[int]], Field] | None = None,
) -> Iterator[Drawn]:
    """Draw `count` samples from number `sampling.first` on, batch by batch.

    Under `once` and `oracle` a sample's expert is known before the first step. Then batches are formed by
    expert, with no more experts in each than stay on the device at once, so over the whole run each expert is
    brought once, and evaluated on as many samples at a time as there are. Otherwise batches follow the
    samples' numbers. Noise, draws and the router's batches are the same either way.

    Args:
        model: experts and router, or one denoiser, for which the routing does not count.
        conditions: of samples by number.
        null: the null condition, one row.
        count: how many.
        sampling: how.
        labels: cluster of each sample by number, for `oracle`.
        around: of a batch's field and the numbers of its samples the field to follow instead.

    Yields:
        Batches; every number is in exactly one.
    """
    plain = sampling.batches(count)
    if not isinstance(model, Ensemble):
        for rows in plain:
            single = SingleField(model, conditions(rows), null, sampling.guidance, len(rows))
            followed = around(single, rows) if around else single
            yield Drawn(rows, sample(followed, sampling.noise(rows), sampling.steps), None)
        return
    chosen = None
    groups, experts = plain, [list[int]() for _ in plain]
    if sampling.routing.strategy in ("once", "oracle") and count:
        chosen = _choose(model, conditions, plain, sampling, labels)
        groups, experts = by_expert(chosen.argmax(1).tolist(), model, sampling.batch)
        groups = [[sampling.first + place for place in group] for group in groups]
    for turn, rows in enumerate(groups):
        field = model.field(
            conditions(rows),
            null,
            sampling.guidance,
            sampling.routing,
            sampling.seed,
            rows,
            None if labels is None else labels[rows],
            None if chosen is None else chosen[[row - sampling.first for row in rows]],
            experts[turn + 1] if turn + 1 < len(groups) else (),
        )
        latents = sample(around(field, rows) if around else field, sampling.noise(rows), sampling.steps)
        yield Drawn(rows, latents, field.trace)


@torch.inference_mode()
def _choose(
    ensemble: Ensemble,
    conditions: Conditions,
    batches: Sequence[list[int]],
    sampling: Sampling,
    labels: Tensor | None,
) -> Tensor:
    """Weights of all samples `(N, K)` at the time that sampling starts at."""
    start, found = float(flow_scheduler(sampling.steps).sigmas[0]), []
    for rows in batches:
        own = None if labels is None else labels[rows]
        found.append(
            ensemble.choose(
                sampling.noise(rows), start, conditions(rows), sampling.routing, sampling.seed, rows, own
            )
        )
    return torch.cat(found)


def by_expert(
    experts: Sequence[int], ensemble: Ensemble, batch: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Samples in batches of few experts.

    Args:
        experts: the expert of each sample.
        ensemble: whose experts they are; resident ones come first.
        batch: most samples in a batch.

    Returns:
        Numbers of the samples of every batch, and the experts of every batch in the order of their use.
    """
    order: Sequence[int] = sorted(set(experts))
    most = getattr(ensemble.experts, "capacity", len(ensemble.experts))
    if isinstance(ensemble.experts, Expecting):
        order = ensemble.experts.expect(order)
    groups: list[list[int]] = []
    used: list[list[int]] = []
    for expert in order:
        rest = [number for number, own in enumerate(experts) if own == expert]
        while rest:
            if not groups or len(groups[-1]) == batch or (used[-1][-1] != expert and len(used[-1]) == most):
                groups.append([])
                used.append([])
            if not used[-1] or used[-1][-1] != expert:
                used[-1].append(expert)
            room = batch - len(groups[-1])
            groups[-1] += rest[:room]
            rest = rest[room:]
    return groups, used
