"""From noise to latents: batches in flight, which every picture is drawn by.

Rows may differ in everything that a `Generation` holds and in how far they have come, so pictures of many
callers share a batch. No row depends on the others: a batch may change between steps, and no picture does.
`generate` runs batches to their end; a server lets rows come and go; a pipeline looks at every step.
"""

import inspect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from atoll.base.condition import Condition, concatenate
from atoll.base.errors import ConfigError
from atoll.base.rng import Position, normals, uniforms
from atoll.flow.prediction import guide
from atoll.model.bank import Bank
from atoll.model.dispatch import Dispatch, Trace, route
from atoll.model.generation import Generation
from atoll.model.routing import PRETRAIN, Routing

Rows = TypeVar("Rows", Condition, Tensor)


@lru_cache(maxsize=256)
def times(steps: int, shift: float = 1.0) -> tuple[float, ...]:
    """Times of N steps, noise first, with the 0 at the end: 1, (N-1)/N, ..., 1/N, 0 before SD3's shift."""
    # Those of diffusers' FlowMatchEulerDiscreteScheduler to the bit, whose import takes a second. Its own
    # grid ends at 1/1000 and wastes a step.
    even = np.linspace(1.0, 1.0 / steps, steps).astype(np.float32)
    return (*(shift * even / (1 + (shift - 1) * even)).tolist(), 0.0)


def starting_noise(seed: int, rows: Sequence[Position], shape: Sequence[int]) -> Float[Tensor, "B C H W"]:
    """Noise of each sample from a generator of its own, so a picture does not depend on its batch."""
    return normals(seed, "sample-noise", rows, shape)


@dataclass(eq=False)
class Row:
    """A picture in flight."""

    generation: Generation
    position: Position  # in the random streams: noise and draws depend on nothing else
    label: int | None = None  # its cluster, for `oracle`
    owner: Any = None
    step: int = 0  # the next one
    experts: frozenset[int] = frozenset()  # that served it at its last step, in either branch

    @property
    def times(self) -> tuple[float, ...]:
        """Of its steps, noise first, with the 0 at the end."""
        return times(self.generation.steps, self.generation.shift)

    @classmethod
    def each(
        cls,
        generation: Generation,
        positions: Sequence[Position],
        labels: Sequence[int] | Tensor | None = None,
    ) -> list[Self]:
        """Rows that are drawn by one generation."""
        clusters = [None] * len(positions) if labels is None else [int(label) for label in labels]
        return [cls(generation, *row) for row in zip(positions, clusters, strict=True)]


class Sampler:
    """A batch in flight; `advance` takes one step for all of its rows.

    Args:
        bank: networks and router. Of one network without a router the rows' routings do not count.
        null: the null condition, one row or one for each.
        weights: `(B, K)` of the first step, where the router was asked before.
        next: experts that are wanted after this batch, in order; those on disk are brought ahead.
        scheduler: a diffusers scheduler of flows with its times set, for rows at the same step; Euler's
            method at the rows' own times by default.
        generator: for schedulers that draw noise.

    Attributes:
        trace: which experts served, step by step, since the sampler was made.
        weights: `(B, K)` of the conditional branch at the last step, in host memory.
        logits: `(B, K)`, what the router last answered for each row.
        v: velocities of the last step `(B, C, H, W)`.
        t: times at which it began `(B,)`.
        routing_seconds: what it took to ask the router and to regroup.
    """

    def __init__(
        self,
        bank: Bank,
        cond: Condition,
        null: Condition,
        rows: Sequence[Row],
        x: Float[Tensor, "B C H W"],
        weights: Float[Tensor, "B K"] | None = None,
        next: Sequence[int] = (),
        scheduler: Any = None,
        generator: torch.Generator | list[torch.Generator] | None = None,
    ) -> None:
        self.bank, self.rows, self.x, self.next = bank, list(rows), x, next
        self.scheduler, self.generator = scheduler, generator
        self.cond, self.null = cond, null.expand(len(rows)) if null.rows == 1 else null
        self.weights: Tensor | None = None
        self.logits: Tensor | None = None
        self.v: Tensor | None = None
        self.t: Tensor | None = None
        self.routing_seconds = 0.0
        routings = [row.generation.routing for row in rows]
        if bank.router is None and bank.k == 1:
            # One network: nothing is chosen, whatever the rows ask for, and `once` never chooses again.
            weights, routings = x.new_ones(len(rows), 1), [Routing()] * len(rows)
        for routing in dict.fromkeys(routings):
            routing.check(bank.k, bank.pretrain is not None)
            if len({*bank.missing, *routing.without}) == bank.k:
                raise ConfigError(f"routing {str(routing)!r} leaves no expert", "leave fewer out")
        labelled = [row for row, routing in zip(rows, routings, strict=True) if routing.needs_labels]
        if any(row.label is None for row in labelled):
            raise ConfigError("routing 'oracle' needs the cluster of every sample", "use another strategy")

        # Guidance: the null branch's rows stand after the conditional ones, in one evaluation. Without a
        # condition there is none, whatever could serve it.
        scales = [row.generation.guidance for row in rows]
        if cond.guidance is not None:  # an input of the network, which has no second branch then
            self.cond = cond = replace(cond, guidance=x.new_tensor(scales))
            scales = [1.0] * len(rows)
        self._guided = [] if cond.empty else [n for n, scale in enumerate(scales) if scale != 1]
        own = {scales[n] for n in self._guided}
        self._scale = own.pop() if len(own) == 1 else torch.tensor([scales[n] for n in self._guided])
        self._both = concatenate([cond, self._of_guided(self.null)]) if self._guided else cond
        places = enumerate(self._guided, len(rows))
        self._pretrained = [place for place, n in places if routings[n].null == PRETRAIN]

        # Of either branch the routings, the weights, and the step of each row that they are known for.
        guided = set(self._guided)
        null_routings = [routing.of_null if n in guided else None for n, routing in enumerate(routings)]
        self._routings: tuple[list[Routing | None], list[Routing | None]] = ([*routings], null_routings)
        self._chosen: list[Tensor | None] = [weights, None]
        unknown = [-1] * len(rows)
        self._known = [unknown if weights is None else [0] * len(rows), unknown]
        self._dispatch: Dispatch | None = None
        self.trace = Trace(branches=2 if self._guided else 1)
        if weights is not None and bank.router is not None:
            self._count_router(len(rows) - len(labelled))

    @property
    def done(self) -> bool:
        """Whether every row has taken all of its steps."""
        if self.scheduler is None:
            return all(row.step >= row.generation.steps for row in self.rows)
        steps = -(-len(self.scheduler.timesteps) // int(self.scheduler.order))
        return all(row.step >= steps for row in self.rows)

    @torch.no_grad()
    def advance(self) -> None:
        """Take one step for every row. A failure leaves states and steps as they were."""
        if self.scheduler is None:
            now = [row.times[row.step] for row in self.rows]
            # Differences in float32, as schedulers take them: one seed is one picture to the bit.
            ahead = [
                float(np.float32(row.times[row.step + 1]) - np.float32(t))
                for row, t in zip(self.rows, now, strict=True)
            ]
            start = self._each(now)
            self._route(self.x, start)
            v = self.velocity(self.x, start)
            # Rows at one step take a number and not a tensor: the same product, without a copy to the device.
            x = self.x + (ahead[0] if len(set(ahead)) == 1 else self._each(ahead).view(-1, 1, 1, 1)) * v
        else:
            # A step of a scheduler's may call the networks several times (Heun: twice).
            scheduler, order, x, step = self.scheduler, int(self.scheduler.order), self.x, self.rows[0].step
            takes = self.generator is not None and "generator" in inspect.signature(scheduler.step).parameters
            more = {"generator": self.generator} if takes else {}
            for call in range(step * order, min((step + 1) * order, len(scheduler.timesteps))):
                # t is read from sigmas, since some schedulers round their timesteps.
                t = x.new_full((len(x),), float(scheduler.sigmas[call]))
                if call == step * order:  # the router is asked once in a step, at its beginning
                    self._route(x, t)
                    start = t
                v = self.velocity(x, t)
                x = scheduler.step(v, scheduler.timesteps[call], x, **more).prev_sample
        self.x, self.v, self.t = x, v, start
        for row in self.rows:
            row.step += 1

    def _each(self, values: Sequence[float]) -> Tensor:
        """A number for each row; where all are the same nothing is copied to the device."""
        if len(set(values)) == 1:
            return self.x.new_full((len(values),), values[0])
        return torch.tensor(values).to(self.x)

    @torch.inference_mode()
    def run(self) -> Float[Tensor, "B C H W"]:
        """Latents: all steps, for rows that take the same number of them."""
        while not self.done:
            self.advance()
        return self.x

    def estimates(self, numbers: Sequence[int]) -> Float[Tensor, "n C H W"]:
        """What the latents of some rows are taken to be after the last step: `x_0 = x_t - t v`."""
        assert self.v is not None
        # The flow at the last step, followed straight to t = 0; v is kept for it, so no network is asked.
        t = self.x.new_tensor([self.rows[n].times[self.rows[n].step] for n in numbers])
        return self.x[list(numbers)] - t.view(-1, 1, 1, 1) * self.v[list(numbers)]

    # Rows come and go between the steps.

    @classmethod
    def merge(cls, samplers: Sequence["Sampler"], kept: Sequence[Sequence[int]] | None = None) -> "Sampler":
        """Rows of several samplers of one bank, without schedulers, in one; of each those `kept`, or all."""
        kept = [range(len(part.rows)) for part in samplers] if kept is None else kept
        parts = list(zip(samplers, kept, strict=True))
        merged = cls(
            samplers[0].bank,
            concatenate([rows_of(part.cond, numbers) for part, numbers in parts]),
            concatenate([rows_of(part.null, numbers) for part, numbers in parts]),
            [part.rows[n] for part, numbers in parts for n in numbers],
            torch.cat([rows_of(part.x, numbers) for part, numbers in parts]),
        )
        merged.logits = _joined([part.logits for part in samplers], kept)
        merged.v = _joined([part.v for part in samplers], kept)
        # What is known goes along: a row that was routed at its step is not routed again by moving. A second
        # answer in a batch of another size could differ in its last bit, and then choose another expert.
        for branch in (0, 1):
            merged._chosen[branch] = _joined([part._chosen[branch] for part in samplers], kept)
            merged._known[branch] = [part._known[branch][n] for part, numbers in parts for n in numbers]
        return merged

    def take(self, kept: Sequence[int]) -> "Sampler":
        """Some of the rows, as far as they have come."""
        return self.merge([self], [kept])

    @property
    def experts(self) -> frozenset[int]:
        """Those that served its rows at their last steps."""
        return frozenset[int]().union(*(row.experts for row in self.rows))

    def can_join(self, other: "Sampler", capacity: int) -> bool:
        """Whether another's rows can join without more than `capacity` experts being wanted."""
        return other.experts <= self.experts or len(self.experts | other.experts) <= capacity

    def split(self, capacity: int, turn: frozenset[int]) -> tuple[list[int], list[list[int]]]:
        """Rows that go on with at most `capacity` experts, and groups of the others."""
        # Those go first whose experts have their turn, so that nobody waits for ever, then those of the most
        # rows. The first group stays in any case, and with it whatever needs none but its experts.
        groups: dict[frozenset[int], list[int]] = {}
        for n, row in enumerate(self.rows):
            groups.setdefault(row.experts, []).append(n)
        held, stay, leave = frozenset[int](), list[int](), list[list[int]]()
        by_turn = sorted(groups.items(), key=lambda group: (not group[0] <= turn, -len(group[1])))
        for experts, numbers in by_turn:
            if not held or experts <= held or len(held | experts) <= capacity:
                held, stay = held | experts, [*stay, *numbers]
            else:
                leave.append(numbers)
        return sorted(stay), leave

    # The flow that a step follows.

    def flow(self, x_t: Float[Tensor, "B C H W"], t: Float[Tensor, "B"]) -> Float[Tensor, "B C H W"]:
        """Guided velocity at any times, where no step is taken: what a student learns."""
        self._route(x_t, t)
        return self.velocity(x_t, t)

    def velocity(self, x_t: Float[Tensor, "B C H W"], t: Float[Tensor, "B"]) -> Float[Tensor, "B C H W"]:
        """Guided velocity, with the routing of the step in hand."""
        x, at, dispatch, costs = x_t, t, self._dispatch, self.bank.costs
        assert dispatch is not None
        # Both branches in one evaluation: an expert that serves both is called once, on twice the rows.
        if self._guided:
            x, at = torch.cat([x_t, self._of_guided(x_t)]), torch.cat([t, self._of_guided(t)])
        self.trace.expert_calls += sum(dispatch.calls)
        self.trace.expert_runs += len(dispatch.numbers)
        each = (*costs.experts, costs.pretrain) if costs else (math.nan,) * len(self.bank)
        self.trace.expert_flops += sum(n * cost for n, cost in zip(dispatch.calls, each, strict=False))
        v = dispatch.run(self.bank, x, at, self.next)
        if not self._guided:
            return v
        v_cond, v_null = v[: len(x_t)], v[len(x_t) :]
        scale = self._scale.to(v) if isinstance(self._scale, Tensor) else self._scale
        return replaced(v_cond, self._guided, guide(self._of_guided(v_cond), v_null, scale), len(v_cond))

    def _of_guided(self, values: Rows) -> Rows:
        return values if len(self._guided) == len(self.rows) else rows_of(values, self._guided)

    @property
    def calls(self) -> list[int]:
        """Rows that each expert was evaluated on at the last step, both branches counted."""
        return [] if self._dispatch is None else self._dispatch.calls[: self.bank.k]

    def first_weights(self) -> Float[Tensor, "B K"]:
        """Weights of the conditional branch at the first step, from the router's logits and the draws."""
        return self._ask(0, range(len(self.rows)), self.x, self._each([row.times[0] for row in self.rows]))

    def _route(self, x_t: Tensor, t: Tensor) -> None:
        """Find this step's weights; what does not change keeps its regrouping by expert."""
        started = time.monotonic()
        before = list(self._chosen)
        steps = [row.step for row in self.rows]
        for branch, routings in enumerate(self._routings):
            each = enumerate(zip(routings, steps, self._known[branch], strict=True))
            asking = [
                n
                for n, (routing, step, known) in each
                if routing is not None and (known < 0 or (step != known and routing.asks_at(step)))
            ]
            if asking:
                fresh = self._ask(branch, asking, x_t, t)
                self._chosen[branch] = replaced(self._chosen[branch], asking, fresh, len(x_t))
            self._known[branch] = steps
        # By identity: weights that were kept are the same tensor, and comparing values would wait for a GPU.
        if self._dispatch is None or any(a is not b for a, b in zip(before, self._chosen, strict=True)):
            weights = both = self._chosen[0]
            assert weights is not None and both is not None
            if self._guided:
                # Rows without a null routing of their own have the conditional branch's experts there too.
                own = [n for n, routing in enumerate(self._routings[1]) if routing is not None]
                null = self._chosen[1]
                null = weights if null is None else replaced(weights, own, rows_of(null, own), len(x_t))
                both = torch.cat([weights, self._of_guided(null)])
            if self._pretrained:
                # The bank's last member has no logit, so nothing but these rows has weight on it.
                both = torch.nn.functional.pad(both, (0, 1))
                both[self._pretrained] = torch.nn.functional.one_hot(
                    torch.tensor(self.bank.k), len(self.bank)
                ).to(both)
            self._dispatch = Dispatch(both, self._both, self._dispatch)
            self.weights = self._dispatch.weights[: len(x_t), : self.bank.k].float()
            served = [set[int]() for _ in self.rows]
            branches = [*range(len(self.rows)), *self._guided]
            for expert in self._dispatch.numbers:
                for place in self._dispatch.rows(expert) if expert < self.bank.k else ():
                    served[branches[place]].add(expert)
            for row, experts in zip(self.rows, served, strict=True):
                row.experts = frozenset(experts)
        assert self.weights is not None
        self.trace.weights.append(self.weights)
        self.routing_seconds = time.monotonic() - started  # ends on the host, so a GPU was waited for

    def _ask(self, branch: int, rows: Sequence[int], x_t: Tensor, t: Tensor) -> Float[Tensor, "n K"]:
        """Weights of some rows in one branch, from the router's logits and the draws of their steps."""
        cond = (self.cond, self.null)[branch]
        groups: dict[tuple[Routing, int], list[int]] = {}
        for place, n in enumerate(rows):
            routing = self._routings[branch][n]
            assert routing is not None
            groups.setdefault((routing, self.rows[n].step), []).append(place)
        asked = [p for (routing, _), group in groups.items() if not routing.needs_labels for p in group]
        logits = self.bank.without_missing(x_t.new_zeros(len(rows), self.bank.k))
        if asked:
            some = [rows[place] for place in asked]
            asked_for = rows_of(cond, some).map(torch.Tensor.contiguous)  # a repeated row meets other kernels
            answer = self.bank.logits(rows_of(x_t, some), rows_of(t, some), asked_for)
            logits = replaced(logits, asked, answer, len(rows))
            self._count_router(len(asked))
        # `without`: as if these experts were missing, so their share goes to the others.
        out = [(p, k) for p, n in enumerate(rows) for k in self.rows[n].generation.routing.without]
        if out:
            places, experts = torch.tensor(out, device=logits.device).T
            logits = logits.index_put((places, experts), logits.new_tensor(-torch.inf))
        if branch == 0:
            self.logits = replaced(self.logits, rows, logits, len(self.rows))
        weights: Tensor | None = None
        for (routing, step), group in groups.items():
            own, pictures = rows_of(logits, group), [self.rows[rows[p]] for p in group]
            labels, draws = None, own.new_empty(len(group), routing.uniforms)
            if routing.needs_labels:
                labels = torch.tensor([row.label for row in pictures], device=own.device)
            elif routing.uniforms:
                # A stream for each branch and step: what a row draws depends on neither batch nor noise.
                positions = [
                    row.position if isinstance(row.position, tuple) else (row.generation.seed, row.position)
                    for row in pictures
                ]
                stream = f"{('route', 'route-null')[branch]}/{step}"
                draws = uniforms(0, stream, positions, (routing.uniforms,)).to(own)
            weights = replaced(weights, group, route(routing, own, draws, labels), len(rows))
        assert weights is not None
        return weights

    def _count_router(self, samples: int) -> None:
        costs = self.bank.costs
        self.trace.router_calls += samples
        self.trace.router_flops += samples * costs.router if costs else math.nan


def rows_of(values: Rows, rows: Sequence[int]) -> Rows:
    """Some rows of a tensor or of a condition; all of them are not copied."""
    if isinstance(values, Condition):
        return values if values.empty or [*rows] == [*range(values.rows)] else values.select([*rows])
    if list(rows) == list(range(len(values))):
        return values
    return values[torch.tensor(list(rows), dtype=torch.long, device=values.device)]


def replaced(old: Tensor | None, rows: Sequence[int], new: Tensor, count: int) -> Tensor:
    """`count` rows, of which some are new; those that were never known are NaN."""
    if list(rows) == list(range(count)):
        return new
    # NaN and not 0: rows that are used before they are known then show in the picture.
    if old is None:
        old = new.new_full((count, *new.shape[1:]), math.nan)
    return old.index_copy(0, torch.tensor(list(rows), dtype=torch.long, device=old.device), new.to(old.dtype))


def _joined(values: Sequence[Tensor | None], kept: Sequence[Sequence[int]]) -> Tensor | None:
    """What is known of each sampler's rows, one after the other; NaN where nothing is."""
    known = next((value for value in values if value is not None), None)
    if known is None:
        return None
    parts = [
        known.new_full((len(rows), *known.shape[1:]), math.nan) if value is None else rows_of(value, rows)
        for value, rows in zip(values, kept, strict=True)
    ]
    return torch.cat(parts)
