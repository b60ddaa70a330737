"""The flow that a sampler follows for one batch: guidance and routing, row by row.

Rows may differ in everything that a `Generation` holds and in how far they have come, so pictures of many
callers share a batch. No row depends on the others: a batch may change between steps, and no picture does.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from atoll.base.condition import Condition, Denoiser, concatenate
from atoll.base.errors import ConfigError
from atoll.base.rng import Position, uniforms
from atoll.flow.guidance import guide
from atoll.model.dispatch import Dispatch
from atoll.model.generation import Generation
from atoll.model.route import route
from atoll.model.routing import PRETRAIN, Routing
from atoll.model.trace import Trace

if TYPE_CHECKING:
    from atoll.model.ensemble import Ensemble

Rows = TypeVar("Rows", Condition, Tensor)


class Field(Protocol):
    """The flow that a sampler integrates, with guidance and routing settled."""

    def __call__(self, x_t: Tensor, t: float, step: int) -> Tensor:
        """Velocity `(B, C, H, W)` at one time for all samples, in step number `step`."""
        ...


class Branches:
    """Classifier-free guidance of one batch: the conditional and the null branch in one evaluation.

    Args:
        cond: conditions of B samples.
        null: the null condition, one row or B.
        guidance: scales, one for each sample; a sample with 1 has no null branch.

    Attributes:
        guided: numbers of the samples that have a null branch.
        both: conditions of all samples, and after them the null ones of the guided.
    """

    def __init__(self, cond: Condition, null: Condition, guidance: Sequence[float]) -> None:
        self.cond, self.null = cond, null.expand(len(guidance)) if null.rows == 1 else null
        # Without a condition there is no guidance, whatever could serve the null branch.
        self.guided = [] if cond.empty else [row for row, scale in enumerate(guidance) if scale != 1]
        scales = [guidance[row] for row in self.guided]
        self._scale = scales[0] if len(set(scales)) == 1 else torch.tensor(scales)
        self._batch = len(guidance)
        self.both = concatenate([cond, self.of_guided(self.null)]) if self.guided else cond

    def of_guided(self, values: Rows) -> Rows:
        """Rows of the guided samples."""
        return values if len(self.guided) == self._batch else rows_of(values, self.guided)

    def velocity(
        self,
        evaluate: Callable[[Tensor, Tensor, Condition], Tensor],
        x_t: Float[Tensor, "B C H W"],
        t: Float[Tensor, "B"],
    ) -> Float[Tensor, "B C H W"]:
        """Guided velocity of what gives velocities of states, times and conditions."""
        if not self.guided:
            return evaluate(x_t, t, self.both)
        both = torch.cat([x_t, self.of_guided(x_t)]), torch.cat([t, self.of_guided(t)])
        v = evaluate(*both, self.both)
        v_cond, v_null = v[: len(x_t)], v[len(x_t) :]
        scale = self._scale.to(v) if isinstance(self._scale, Tensor) else self._scale
        return replaced(v_cond, self.guided, guide(self.of_guided(v_cond), v_null, scale), len(v_cond))


class RoutedField:
    """An ensemble's flow for one batch: keeps the weights between the steps that ask the router.

    Args:
        ensemble: whose flow it is.
        cond: conditions of B samples.
        null: the null condition, one row or B.
        generations: guidance, routing, and the seed of the routing draws, one for each sample.
        positions: place of each sample in the random streams; its draws depend on nothing else.
        labels: cluster of each sample, for `oracle`.
        chosen: weights `(B, K)` of the first step, where they were asked for before.
        later: experts that are wanted after this batch, in order; those on disk are brought ahead.

    Attributes:
        trace: who served the samples, step by step, since the field was made.
        weights: `(B, K)` of the conditional branch at the last step, in host memory.
        logits: `(B, K)`, what the router last answered for each sample.
        used: `(B, K)`, whether an expert served a sample in either branch at the last step, in host memory.
        routing_seconds: what the last step took to ask the router and to regroup.
    """

    def __init__(
        self,
        ensemble: "Ensemble",
        cond: Condition,
        null: Condition,
        generations: Sequence[Generation],
        positions: Sequence[Position],
        labels: Sequence[int] | None = None,
        chosen: Tensor | None = None,
        later: Sequence[int] = (),
    ) -> None:
        labelled = [row for row, one in enumerate(generations) if one.routing.needs_labels]
        if labelled and labels is None:
            raise ConfigError("routing 'oracle' needs the cluster of every sample", "use another strategy")
        for routing in {str(one.routing): one.routing for one in generations}.values():
            routing.check(len(ensemble.experts)).check_null(ensemble.pretrain is not None)
            if len({*ensemble.missing, *routing.without}) == len(ensemble.experts):
                raise ConfigError(f"routing {str(routing)!r} leaves no expert", "leave fewer out")
        self.ensemble, self.later = ensemble, later
        self.generations, self.positions, self.labels = list(generations), list(positions), labels
        self.branches = Branches(cond, null, [one.guidance for one in generations])
        self.trace = Trace(branches=2 if self.branches.guided else 1)
        self.weights: Tensor | None = None
        self.logits: Tensor | None = None
        self.used: Tensor | None = None
        self.routing_seconds = 0.0
        # Of either branch the routings, the weights, and the step of each sample that they are known for.
        guided = set(self.branches.guided)
        self._routings: tuple[list[Routing | None], list[Routing | None]] = (
            [one.routing for one in generations],
            [one.routing.of_null if row in guided else None for row, one in enumerate(generations)],
        )
        # Whether shared pretraining's network serves a row, in the order of `Branches.both`.
        self._pretrained = [False] * len(generations)
        self._pretrained += [generations[row].routing.null == PRETRAIN for row in self.branches.guided]
        self._apart: Dispatch | None = None
        self._chosen: list[Tensor | None] = [chosen, None]
        unknown = [-1] * len(self.positions)
        self._steps = [unknown if chosen is None else [0] * len(unknown), unknown]
        self._dispatch: Dispatch | None = None
        if chosen is not None:  # the router was asked for these samples
            self._count_router(len(unknown) - len(labelled))

    @classmethod
    def merged(cls, fields: Sequence["RoutedField"], rows: Sequence[Sequence[int]]) -> "RoutedField":
        """One field of samples of several, as far as each has come.

        Args:
            fields: of one ensemble.
            rows: numbers of the samples that go on, of each field.
        """
        both = list(zip(fields, rows, strict=True))
        of = [(one, row) for one, kept in both for row in kept]
        new = cls(
            fields[0].ensemble,
            concatenate([rows_of(one.branches.cond, kept) for one, kept in both]),
            concatenate([rows_of(one.branches.null, kept) for one, kept in both]),
            [one.generations[row] for one, row in of],
            [one.positions[row] for one, row in of],
            [-1 if one.labels is None else one.labels[row] for one, row in of],
        )
        new.logits = _joined([one.logits for one in fields], both)
        for branch in (0, 1):
            new._chosen[branch] = _joined([one._chosen[branch] for one in fields], both)
            new._steps[branch] = [one._steps[branch][row] for one, row in of]
        return new

    def __call__(
        self, x_t: Float[Tensor, "B C H W"], t: float | Float[Tensor, "B"], step: int | Sequence[int]
    ) -> Float[Tensor, "B C H W"]:
        """Guided velocity; the router is asked once per step however often a solver calls.

        Args:
            x_t: states.
            t: times, one for all samples or one for each.
            step: number of the step, likewise.
        """
        times = t if isinstance(t, Tensor) else x_t.new_full((len(x_t),), t)
        steps = [step] * len(x_t) if isinstance(step, int) else list(step)
        if self._dispatch is None or steps != self._steps[0]:
            started = time.monotonic()
            self._route(x_t, times, steps)  # ends on the host, so a GPU is waited for
            self.routing_seconds = time.monotonic() - started
        return self.branches.velocity(self._evaluate, x_t, times)

    @property
    def calls(self) -> list[int]:
        """Rows that each expert was evaluated on at the last step, both branches counted."""
        return [] if self._dispatch is None else self._dispatch.calls

    def weights_at(self, x_t: Float[Tensor, "B C H W"], t: float, step: int) -> Float[Tensor, "B K"]:
        """Weights of the conditional branch, from the router's logits and the draws of the step."""
        return self._ask(0, range(len(x_t)), x_t, x_t.new_full((len(x_t),), t), [step] * len(x_t))

    def _route(self, x_t: Tensor, t: Tensor, steps: list[int]) -> None:
        """Find this step's weights; what does not change keeps its regrouping by expert."""
        before = list(self._chosen)
        for branch, routings in enumerate(self._routings):
            last = self._steps[branch]
            asking = [
                row
                for row, routing in enumerate(routings)
                if routing is not None
                and (last[row] < 0 or (steps[row] != last[row] and routing.asks_at(steps[row])))
            ]
            if asking:
                fresh = self._ask(branch, asking, x_t, t, steps)
                self._chosen[branch] = replaced(self._chosen[branch], asking, fresh, len(x_t))
            self._steps[branch] = steps
        if self._dispatch is None or any(a is not b for a, b in zip(before, self._chosen, strict=True)):
            weights = both = self._chosen[0]
            assert weights is not None and both is not None
            if self.branches.guided:
                own = [row for row, routing in enumerate(self._routings[1]) if routing is not None]
                null = self._chosen[1]
                null = weights if null is None else replaced(weights, own, rows_of(null, own), len(x_t))
                both = torch.cat([weights, self.branches.of_guided(null)])
            if any(self._pretrained):
                apart = torch.tensor(self._pretrained, device=both.device)[:, None]
                both = both.masked_fill(apart, 0)
                self._apart = self._apart or Dispatch(apart.to(both), self.branches.both)
            self._dispatch = Dispatch(both, self.branches.both, self._dispatch)
            self.weights = weights.float().cpu()
            host = both.cpu() > 0
            self.used = host[: len(x_t)]
            if self.branches.guided:
                self.used = self.used.clone()
                self.used[self.branches.guided] |= host[len(x_t) :]
        assert self.weights is not None
        self.trace.weights.append(self.weights)

    def _ask(
        self, branch: int, rows: Sequence[int], x_t: Tensor, t: Tensor, steps: Sequence[int]
    ) -> Float[Tensor, "n K"]:
        """Weights of some samples in one branch, from the router's logits and the draws of their steps."""
        cond = (self.branches.cond, self.branches.null)[branch]
        groups: dict[tuple[Routing, int], list[int]] = {}
        for place, row in enumerate(rows):
            routing = self._routings[branch][row]
            assert routing is not None
            groups.setdefault((routing, steps[row]), []).append(place)
        asked = [p for (routing, _), group in groups.items() if not routing.needs_labels for p in group]
        logits = self.ensemble.without_missing(x_t.new_zeros(len(rows), len(self.ensemble.experts)))
        if asked:
            some = [rows[place] for place in asked]
            own = rows_of(cond, some).map(torch.Tensor.contiguous)  # a repeated row meets other kernels
            answer = self.ensemble.logits(rows_of(x_t, some), rows_of(t, some), own)
            logits = replaced(logits, asked, answer, len(rows))
            self._count_router(len(asked))
        out = [(p, k) for p, row in enumerate(rows) for k in self.generations[row].routing.without]
        if out:
            places, experts = torch.tensor(out, device=logits.device).T
            logits = logits.index_put((places, experts), logits.new_tensor(-torch.inf))
        if branch == 0:
            self.logits = replaced(self.logits, rows, logits, len(self.positions))
        weights: Tensor | None = None
        for (routing, step), group in groups.items():
            found = self._routed(routing, rows_of(logits, group), [rows[p] for p in group], branch, step)
            weights = replaced(weights, group, found, len(rows))
        assert weights is not None
        return weights

    def _routed(
        self, routing: Routing, logits: Tensor, rows: Sequence[int], branch: int, step: int
    ) -> Float[Tensor, "n K"]:
        if routing.needs_labels:
            assert self.labels is not None
            return route(routing, logits, logits, torch.tensor([self.labels[row] for row in rows]))
        if not routing.uniforms:
            return route(routing, logits, logits.new_empty(len(logits), 0))
        places = [
            p if isinstance(p := self.positions[row], tuple) else (self.generations[row].seed, p)
            for row in rows
        ]
        draws = uniforms(0, f"{('route', 'route-null')[branch]}/{step}", places, (routing.uniforms,))
        return route(routing, logits, draws.to(logits))

    def _count_router(self, samples: int) -> None:
        costs = self.ensemble.costs
        self.trace.router_calls += samples
        self.trace.router_flops += samples * costs.router if costs else math.nan

    def _evaluate(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        dispatch, costs = self._dispatch, self.ensemble.costs
        assert dispatch is not None
        others = sum(self._pretrained)
        self.trace.expert_calls += sum(dispatch.calls) + others
        self.trace.expert_runs += len(dispatch.numbers) + (others > 0)
        self.trace.expert_flops += (
            sum(n * cost for n, cost in zip(dispatch.calls, costs.experts, strict=True))
            + others * costs.pretrain
            if costs
            else math.nan
        )
        v = dispatch.run(self.ensemble.experts, x_t, t, self.later)
        return v if self._apart is None else v + self._apart.run([self.ensemble.pretrain], x_t, t)


class SingleField:
    """One denoiser's flow for one batch, with guidance.

    Args:
        denoiser: the network.
        cond: conditions of B samples.
        null: the null condition, one row or B.
        guidance: scales, one for each sample.
    """

    def __init__(
        self, denoiser: Denoiser, cond: Condition, null: Condition, guidance: Sequence[float]
    ) -> None:
        self.denoiser, self.guidance = denoiser, guidance
        self.branches = Branches(cond, null, guidance)

    @classmethod
    def merged(cls, fields: Sequence["SingleField"], rows: Sequence[Sequence[int]]) -> "SingleField":
        """One field of samples of several, as `RoutedField.merged`."""
        both = list(zip(fields, rows, strict=True))
        return cls(
            fields[0].denoiser,
            concatenate([rows_of(one.branches.cond, kept) for one, kept in both]),
            concatenate([rows_of(one.branches.null, kept) for one, kept in both]),
            [one.guidance[row] for one, kept in both for row in kept],
        )

    def __call__(
        self, x_t: Float[Tensor, "B C H W"], t: float | Float[Tensor, "B"], step: int | Sequence[int]
    ) -> Float[Tensor, "B C H W"]:
        """Guided velocity."""
        times = t if isinstance(t, Tensor) else x_t.new_full((len(x_t),), t)
        return self.branches.velocity(self.denoiser.velocity, x_t, times)


def rows_of(values: Rows, rows: Sequence[int]) -> Rows:
    """Some rows of a tensor or of a condition; all of them are not copied."""
    if isinstance(values, Condition):
        every = values.empty or list(rows) == list(range(values.rows))
        return values if every else values.take(rows)
    if list(rows) == list(range(len(values))):
        return values
    return values[torch.tensor(list(rows), dtype=torch.long, device=values.device)]


def replaced(old: Tensor | None, rows: Sequence[int], new: Tensor, count: int) -> Tensor:
    """`count` rows, of which some are new; those that were never known are NaN."""
    if list(rows) == list(range(count)):
        return new
    if old is None:
        old = new.new_full((count, *new.shape[1:]), math.nan)
    return old.index_copy(0, torch.tensor(list(rows), dtype=torch.long, device=old.device), new.to(old.dtype))


def _joined(values: Sequence[Tensor | None], both: Sequence[tuple[object, Sequence[int]]]) -> Tensor | None:
    """What is known of each field's samples, one after the other; NaN where nothing is."""
    known = next((value for value in values if value is not None), None)
    if known is None:
        return None
    parts = [
        known.new_full((len(rows), known.shape[1]), math.nan) if value is None else rows_of(value, rows)
        for value, (_, rows) in zip(values, both, strict=True)
    ]
    return torch.cat(parts)
