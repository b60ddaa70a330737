"""Any number of samples in batches; where experts are known from the start, ordered by expert."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from atoll.base.condition import Condition, Denoiser
from atoll.base.errors import ConfigError
from atoll.base.rng import Position
from atoll.model.dispatch import Expecting
from atoll.model.ensemble import Ensemble
from atoll.model.field import Field, SingleField
from atoll.model.generation import Generation
from atoll.model.integrate import sample, scheduler_of, starting_noise
from atoll.model.trace import Trace


@dataclass(frozen=True)
class Conditions:
    """Conditions of samples by number.

    Attributes:
        cond: of some numbers their conditions, one row each.
        null: what guidance leads away from: one row, or one for each number.
        count: how many samples they are for.
        texts: what was asked for, as it was written.
    """

    cond: Callable[[Sequence[int]], Condition]
    null: Condition
    count: int
    texts: tuple[str, ...] = ()

    @classmethod
    def of_rows(
        cls, cond: Condition, null: Condition, count: int, texts: Sequence[str] = (), each: int = 1
    ) -> "Conditions":
        """Those of rows that are at hand, `each` samples of every row one after the other."""

        if null.rows not in (1, count):
            fix = "give one for all, or one for each"
            raise ConfigError(f"{null.rows} negative prompts for {count} prompts", fix)
        if null.rows > 1:
            null = null.map(lambda part: part.repeat_interleave(each, dim=0))
        return cls(lambda numbers: cond.take([n // each for n in numbers]), null, count * each, tuple(texts))

    def of(self, numbers: Sequence[int], device: torch.device | str) -> tuple[Condition, Condition]:
        """Conditions and null conditions of some samples, on a device."""
        null = self.null if self.null.rows <= 1 else self.null.take(numbers)
        return self.cond(numbers).to(device), null.to(device)


@dataclass(frozen=True)
class Batch:
    """One batch of samples.

    Attributes:
        rows: numbers of the samples.
        latents: `(B, C, H, W)`.
        trace: who served them; None for a single denoiser.
    """

    rows: list[int]
    latents: Tensor
    trace: Trace | None


@dataclass(frozen=True)
class Sampling:
    """Everything about a number of samples but who draws them.

    Attributes:
        generation: steps, guidance, routing, seed.
        conditions: of samples by number.
        shape: of a latent, (C, H, W).
        count: how many samples.
        first: number of the first one; those before it are somebody else's.
        batch: most samples at once; it does not change them.
        device: where sampling happens.
        labels: cluster of each sample by number, for `oracle`.
        position: of a sample's number its place in the random streams; the number itself by default.
        noise: of samples' numbers what they start from; by default what the streams give.
        around: of a batch's field and its samples' numbers the field to follow instead.
        integrate: of a batch's field and its noise the latents; by default the generation's scheduler. Its
            batches are in the order of the numbers, since callers look at them between the steps.
    """

    generation: Generation
    conditions: Conditions
    shape: tuple[int, int, int]
    count: int
    first: int = 0
    batch: int = 64
    device: torch.device | str = "cpu"
    labels: Int[Tensor, "N"] | None = None
    position: Callable[[int], Position] = int
    noise: Callable[[Sequence[int]], Tensor] | None = None
    around: Callable[[Field, Sequence[int]], Field] | None = None
    integrate: Callable[[Field, Tensor], Tensor] | None = None

    def streams(self, rows: Sequence[int]) -> list[Position]:
        """Places of samples in the random streams."""
        return [self.position(row) for row in rows]

    def starts(self, rows: Sequence[int]) -> Tensor:
        """What samples start from `(B, C, H, W)`."""
        if self.noise is not None:
            return self.noise(rows).to(self.device)
        return starting_noise(self.generation.seed, self.streams(rows), self.shape).to(self.device)

    def of_labels(self, rows: Sequence[int]) -> Tensor | None:
        """Clusters of samples, if they are known."""
        return None if self.labels is None else self.labels[list(rows)]

    def follow(self, field: Field, rows: Sequence[int]) -> Tensor:
        """Latents of samples that follow a field."""
        followed = self.around(field, rows) if self.around else field
        if self.integrate is not None:
            return self.integrate(followed, self.starts(rows))
        return sample(followed, self.starts(rows), self.generation.steps, scheduler_of(self.generation))

    def batches(self) -> list[list[int]]:
        """The samples' numbers in batches, in order."""
        end = self.first + self.count
        firsts = range(self.first, end, self.batch)
        return [list(range(start, min(start + self.batch, end))) for start in firsts]


def generate(denoiser: Ensemble | Denoiser, sampling: Sampling) -> Iterator[Batch]:
    """Draw samples batch by batch.

    Under `once` and `oracle` a sample's expert is known before the first step. Then batches are formed by
    expert, with no more experts in each than stay on the device at once, so over the whole run each expert is
    brought once, and evaluated on as many samples at a time as there are. Otherwise batches follow the
    samples' numbers. Noise, draws and the router's batches are the same either way.

    Args:
        denoiser: experts and router, or one network, for which the routing does not count.
        sampling: how many, of what, and how.

    Yields:
        Batches; every number is in exactly one.
    """
    plain, generation = sampling.batches(), sampling.generation
    if not isinstance(denoiser, Ensemble):
        for rows in plain:
            cond, null = sampling.conditions.of(rows, sampling.device)
            single = SingleField(denoiser, cond, null, [generation.guidance] * len(rows))
            yield Batch(rows, sampling.follow(single, rows), None)
        return
    generation.routing.check(len(denoiser.experts))
    chosen = None
    groups, experts = plain, [list[int]() for _ in plain]
    if generation.routing.fixed_at_start and sampling.integrate is None and plain:
        chosen = _first_weights(denoiser, sampling)
        groups, experts = by_expert(chosen.argmax(1).tolist(), denoiser, sampling.batch)
        groups = [[sampling.first + place for place in group] for group in groups]
    for turn, rows in enumerate(groups):
        field = denoiser.field(
            *sampling.conditions.of(rows, sampling.device),
            generation,
            sampling.streams(rows),
            sampling.of_labels(rows),
            None if chosen is None else chosen[[row - sampling.first for row in rows]],
            experts[turn + 1] if turn + 1 < len(groups) else (),
        )
        yield Batch(rows, sampling.follow(field, rows), field.trace)


@torch.inference_mode()
def _first_weights(ensemble: Ensemble, sampling: Sampling) -> Tensor:
    """Weights of all samples `(N, K)` at the time that sampling starts at."""
    start, weights = float(scheduler_of(sampling.generation).sigmas[0]), []
    unguided = sampling.generation.with_(guidance=1.0)
    for rows in sampling.batches():
        field = ensemble.field(
            *sampling.conditions.of(rows, sampling.device),
            unguided,
            sampling.streams(rows),
            sampling.of_labels(rows),
        )
        weights.append(field.weights_at(sampling.starts(rows), start, 0))
    return torch.cat(weights)


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
        rest = [number for number, first in enumerate(experts) if first == expert]
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
