"""Rows of one model that take their steps together, each at its own time; they come and go between steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from atoll.model.ensemble import Ensemble
from atoll.model.field import RoutedField, SingleField
from atoll.model.integrate import scheduler_of, starting_noise
from atoll.model.model import Model
from atoll.serve.job import Job


@dataclass(eq=False)
class Row:
    """A picture on its way.

    Attributes:
        job: the request that it belongs to.
        number: of the picture in its request, and its place in the random streams.
        sigmas: times of its steps, noise first, with the 0 at the end.
        partial: steps after which a partial picture is wanted.
        step: the next one.
        experts: those that served it at its last step, and most likely will at the next; none before.
        routing: what `Finished.routing` tells, so far.
    """

    job: Job
    number: int
    sigmas: Tensor
    partial: tuple[int, ...]
    step: int = 0
    experts: frozenset[int] = frozenset()
    routing: list[dict[str, Any]] | None = None

    @property
    def steps(self) -> int:
        """How many it takes."""
        return len(self.sigmas) - 1


@dataclass
class Lane:
    """A batch between two steps.

    Attributes:
        rows: the pictures.
        x: their states `(B, C, H, W)`.
        flow: what they follow.
        v: their velocities at the last step.
        t: the times of it.
    """

    rows: list[Row]
    x: Tensor
    flow: RoutedField | SingleField
    v: Tensor | None = field(default=None, init=False)
    t: Tensor | None = field(default=None, init=False)

    @classmethod
    def of(cls, job: Job, model: Model) -> "Lane":
        """The rows of a request before their first step.

        Raises:
            ConfigError: prompts that do not fit the model, or a routing that its experts cannot follow.
        """
        generation = job.generation.for_condition(model.card.condition)
        conditions = model.conditions(job.prompts, job.negative, each=job.count)
        numbers = range(job.count)
        cond, null = conditions.of(numbers, model.device)
        denoiser = model.denoiser
        flow: RoutedField | SingleField
        if isinstance(denoiser, Ensemble):
            flow = denoiser.field(cond, null, generation, numbers)
        else:
            flow = SingleField(denoiser, cond, null, [generation.guidance] * job.count)
        sigmas = scheduler_of(generation).sigmas
        steps = len(sigmas) - 1
        partial = tuple(steps * (n + 1) // (job.partial + 1) - 1 for n in range(job.partial))
        rows = [Row(job, number, sigmas, partial) for number in numbers]
        noise = starting_noise(generation.seed, numbers, model.shape_for(generation.size))
        return cls(rows, noise.to(model.device), flow)

    @classmethod
    def merged(cls, lanes: Sequence["Lane"], kept: Sequence[Sequence[int]] | None = None) -> "Lane":
        """Rows of several lanes of one model in one.

        Args:
            lanes: one or more.
            kept: of each lane the numbers of the rows that go on; all by default.
        """
        numbers = kept if kept is not None else [range(len(lane.rows)) for lane in lanes]
        rows = [lane.rows[n] for lane, some in zip(lanes, numbers, strict=True) for n in some]
        x = torch.cat([lane.x[list(some)] for lane, some in zip(lanes, numbers, strict=True)])
        flows = [lane.flow for lane in lanes]
        if isinstance(flows[0], RoutedField):
            routed = [flow for flow in flows if isinstance(flow, RoutedField)]
            return cls(rows, x, RoutedField.merged(routed, numbers))
        single = [flow for flow in flows if isinstance(flow, SingleField)]
        return cls(rows, x, SingleField.merged(single, numbers))

    @property
    def experts(self) -> frozenset[int]:
        """Those that served its rows at their last steps."""
        return frozenset[int]().union(*(row.experts for row in self.rows))

    def fits(self, other: "Lane", most: int) -> bool:
        """Whether another lane's rows can join without more than `most` experts being wanted."""
        return other.experts <= self.experts or len(self.experts | other.experts) <= most

    def apart(self, most: int, turn: frozenset[int]) -> tuple[list[int], list[list[int]]]:
        """Rows that go on with at most `most` experts, and groups of the others.

        Those go first whose experts have their turn, then those of the most rows.

        The first group stays in any case, and with it whatever needs none but its experts.
        """
        groups: dict[frozenset[int], list[int]] = {}
        for n, row in enumerate(self.rows):
            groups.setdefault(row.experts, []).append(n)
        held, stay, leave = frozenset[int](), list[int](), list[list[int]]()
        for experts, rows in sorted(groups.items(), key=lambda one: (not one[0] <= turn, -len(one[1]))):
            if not held or experts <= held or len(held | experts) <= most:
                held, stay = held | experts, [*stay, *rows]
            else:
                leave.append(rows)
        return sorted(stay), leave

    def take(self, kept: Sequence[int]) -> "Lane":
        """Some of the rows, as far as they have come."""
        return self.merged([self], [kept])

    @torch.inference_mode()
    def advance(self) -> None:
        """Take one step of Euler's for every row. A failure leaves the lane as it was."""
        rows = self.rows
        t = torch.stack([row.sigmas[row.step] for row in rows]).to(self.x)
        steps = torch.stack([row.sigmas[row.step + 1] - row.sigmas[row.step] for row in rows])
        v = self.flow(self.x, t, [row.step for row in rows])
        self.x, self.v, self.t = self.x + steps.to(self.x).view(-1, 1, 1, 1) * v, v, t
        if isinstance(self.flow, RoutedField):
            self._note(self.flow)
        for row in rows:
            row.step += 1

    def estimates(self, numbers: Sequence[int]) -> Tensor:
        """What the pictures of some rows are taken to be after the last step: `x_0 = x_t - t v`."""
        assert self.v is not None
        some = list(numbers)
        left = torch.stack([self.rows[n].sigmas[self.rows[n].step] for n in some]).to(self.x)
        return self.x[some] - left.view(-1, 1, 1, 1) * self.v[some]

    def _note(self, flow: RoutedField) -> None:
        """Write down by row which experts serve it, where that changed, and what the router answered."""
        assert flow.weights is not None and flow.used is not None
        weights, used = flow.weights.tolist(), flow.used.tolist()
        logits = flow.logits
        probabilities = None if logits is None else logits.float().softmax(dim=1).cpu().tolist()
        for n, row in enumerate(self.rows):
            row.experts = frozenset(k for k, does in enumerate(used[n]) if does)
            experts = {str(k): round(w, 4) for k, w in enumerate(weights[n]) if w}
            row.routing = [] if row.routing is None else row.routing
            asked = row.job.generation.routing.asks_at(row.step)
            if asked or not row.routing or row.routing[-1]["experts"] != experts:
                entry: dict[str, Any] = {"step": row.step, "experts": experts}
                if asked and probabilities is not None:
                    entry["probabilities"] = [round(p, 4) for p in probabilities[n]]
                row.routing.append(entry)
