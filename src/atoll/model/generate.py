"""Any number of samples in batches; where experts are known from the start, ordered by expert."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.base.rng import Position
from atoll.model.bank import Bank
from atoll.model.dispatch import Trace
from atoll.model.generation import Generation
from atoll.model.sampler import Row, Sampler, starting_noise


@dataclass(frozen=True)
class Conditions:
    """Conditions of `count` samples by number."""

    cond: Callable[[Sequence[int]], Condition]  # those of some numbers, one row each
    null: Condition  # what guidance leads away from: one row, or one for each number
    count: int
    texts: tuple[str, ...] = ()  # prompts as they were written

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
        return cls(lambda rows: cond.select([n // each for n in rows]), null, count * each, tuple(texts))

    def of(self, numbers: Sequence[int], device: torch.device | str) -> tuple[Condition, Condition]:
        """Conditions and null conditions of some samples, on a device."""
        null = self.null if self.null.rows <= 1 else self.null.select(list(numbers))
        return self.cond(numbers).to(device), null.to(device)


@dataclass(frozen=True)
class Batch:
    """One batch: numbers of the samples, latents `(B, C, H, W)`, who served them (None for one network)."""

    rows: list[int]
    latents: Tensor
    trace: Trace | None


@dataclass(frozen=True)
class Sampling:
    """Everything about a number of samples but who draws them."""

    generation: Generation
    conditions: Conditions
    shape: tuple[int, int, int]  # of a latent, (C, H, W)
    count: int
    first: int = 0  # number of the first sample; those before it are somebody else's
    batch: int = 64  # most samples at once; it does not change them
    device: torch.device | str = "cpu"
    labels: Int[Tensor, "N"] | None = None  # cluster of each sample by number, for `oracle`
    positions: Sequence[Position] | None = None  # in the random streams; the numbers by default
    noise: Float[Tensor, "M C H W"] | None = None  # to start from; by default what the streams give
    sampler: Callable[..., Sampler] = Sampler  # what steps a batch

    def start(self, bank: Bank, numbers: Sequence[int], **more: Any) -> Sampler:
        """A batch of samples before its first step; `more` are further arguments of the sampler."""
        # Streams go by position, not by the sample's place in this run: sample 7 is the same in any run.
        positions = [number if self.positions is None else self.positions[number] for number in numbers]
        labels = None if self.labels is None else self.labels[list(numbers)]
        if self.noise is None:
            x = starting_noise(self.generation.seed, positions, self.shape)
        else:
            x = self.noise[list(numbers)]
        cond, null = self.conditions.of(numbers, self.device)
        rows = Row.each(self.generation, positions, labels)
        return self.sampler(bank, cond, null, rows, x.to(self.device), **more)


def generate(bank: Bank, sampling: Sampling) -> Iterator[Batch]:
    """Draw samples batch by batch; every number is in exactly one."""
    for numbers, sampler in samplers(bank, sampling):
        yield Batch(numbers, sampler.run(), None if bank.router is None else sampler.trace)


def samplers(bank: Bank, sampling: Sampling) -> Iterator[tuple[list[int], Sampler]]:
    """Batches of samples before their first step, with the samples' numbers.

    Under `once` and `oracle` a sample's expert is known before the first step. Then batches are formed by
    expert; otherwise they follow the samples' numbers. The pictures are the same either way.
    """
    end = sampling.first + sampling.count
    starts = range(sampling.first, end, sampling.batch)
    groups = [list(range(start, min(start + sampling.batch, end))) for start in starts]
    if bank.router is None or not sampling.generation.routing.rule.fixed or not groups:
        for numbers in groups:
            yield numbers, sampling.start(bank, numbers)
        return
    # The first weights are asked for without guidance: who serves the null branch is found at each step.
    unguided = replace(sampling, generation=sampling.generation.with_(guidance=1.0), sampler=Sampler)
    with torch.inference_mode():
        weights = torch.cat([unguided.start(bank, numbers).first_weights() for numbers in groups])
    groups, used = by_expert(weights.argmax(1).tolist(), bank, sampling.batch)
    for rows, later in zip(groups, [*used[1:], []], strict=True):
        numbers = [sampling.first + row for row in rows]
        # The weights go along: asked again in other batches, a logit's last bit might choose another expert.
        yield numbers, sampling.start(bank, numbers, weights=weights[rows], next=later)


def by_expert(experts: Sequence[int], bank: Bank, batch: int) -> tuple[list[list[int]], list[list[int]]]:
    """Samples in batches of few experts, from the expert of each.

    Returns:
        Positions of the samples of every batch, and the experts of every batch in the order of their use.
    """
    # No more experts in a batch than stay on the device at once: over the whole run each is brought once, and
    # evaluated on as many samples at a time as there are.
    groups, used = list[list[int]](), list[list[int]]()
    for expert in bank.prefetch(sorted(set(experts))):
        rest = [row for row, own in enumerate(experts) if own == expert]
        while rest:
            another = not groups or used[-1][-1] != expert
            if not groups or len(groups[-1]) == batch or (another and len(used[-1]) == bank.capacity):
                groups.append([])
                used.append([])
            if expert not in used[-1]:
                used[-1].append(expert)
            room = batch - len(groups[-1])
            groups[-1] += rest[:room]
            rest = rest[room:]
    return groups, used
