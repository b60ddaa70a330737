"""Distillation: one dense network learns the flow of all experts. It needs no router when it is used.

The teacher of a training sample is the expert of the sample's own cluster (DDM, "Distillation"), or, on
request, the ensemble as it is sampled, with the router's weights. Teachers are denoisers: whatever they
predict on whatever schedule, the student learns their rectified-flow velocity.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.base.rng import uniforms
from atoll.campaign.settings.train import VALIDATION_TIMES
from atoll.flow.objective import noisy, per_sample_loss, target
from atoll.model.bank import Bank
from atoll.model.dispatch import Dispatch, Networks
from atoll.model.route import route
from atoll.model.routing import Routing
from atoll.train.expert import DenoiserTask
from atoll.train.rows import Batch, TrainingRows


class Teacher(Protocol):
    """Who a student learns from."""

    @property
    def draws(self) -> int:
        """Uniform numbers that a sample brings along."""
        ...

    def velocity(self, x_t: Tensor, t: Tensor, cond: Condition, clusters: Tensor, draws: Tensor) -> Tensor:
        """The velocity `(B, C, H, W)` to learn at states of known clusters `(B,)`; `draws (B, n)`."""
        ...


@dataclass(frozen=True)
class ClusterTeacher:
    """The expert of each sample's own cluster. A batch is regrouped, so every expert runs once at most."""

    experts: Networks
    draws: int = 0

    def velocity(self, x_t: Tensor, t: Tensor, cond: Condition, clusters: Tensor, draws: Tensor) -> Tensor:
        """That of the cluster's own expert."""
        weights = nn.functional.one_hot(clusters, len(self.experts)).to(x_t.dtype)
        return Dispatch(weights, cond).run(self.experts, x_t, t)


@dataclass(frozen=True)
class RoutedTeacher:
    """The ensemble under a routing strategy; the router is asked at every state."""

    bank: Bank
    routing: Routing

    @property
    def draws(self) -> int:
        """Those of the strategy."""
        return max(1, self.routing.uniforms)

    def velocity(self, x_t: Tensor, t: Tensor, cond: Condition, clusters: Tensor, draws: Tensor) -> Tensor:
        """That of the experts that the strategy chooses."""
        logits = self.bank.logits(x_t, t, cond).float()
        weights = route(self.routing, logits, draws.to(logits), None)
        return Dispatch(weights, cond).run(self.bank.experts, x_t, t)


class DistillTask(DenoiserTask):
    """The task of `train.loop.train` for the student.

    Args:
        network: initialised, on its device.
        rows: of the whole data set, with clusters; the objective is v on rectified flow.
        teacher: on the same device.
        data_weight: weight of the loss against the data.
    """

    def __init__(self, network: nn.Module, rows: TrainingRows, teacher: Teacher, data_weight: float) -> None:
        super().__init__(network, rows)
        self.teacher, self.data_weight = teacher, data_weight

    def batch(self, positions: range) -> Batch:
        """Latents, conditions, noise, times and clusters of these positions, and the teacher's draws."""
        return self._with_draws(self.rows.batch(positions), self.recipe.plan.seed, positions)

    def step(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Mean squared error against the teacher's velocity, mixed with that against the data's."""
        taught, data = self._both(batch.to(self.device))
        if not self.data_weight:
            return taught.mean(), {}
        loss = torch.lerp(taught.mean(), data.mean(), self.data_weight)
        return loss, {"teacher_loss": float(taught.detach().mean()), "data_loss": float(data.detach().mean())}

    def validate(self) -> dict[str, Any]:
        """Loss on held-out rows against the data, as the monolith's, and against the teacher."""
        losses, teacher = [], []
        for batches in self.rows.validation():
            pairs = [self._both(batch.to(self.device)) for batch in self._all_with_draws(batches)]
            taught, data = (torch.cat(parts) for parts in zip(*pairs, strict=True))
            losses.append(float(data.mean()))
            teacher.append(float(taught.mean()))
        if not losses:
            return {}
        return {
            "times": VALIDATION_TIMES,
            "validation": losses,
            "validation_loss": sum(losses) / len(losses),
            "teacher_by_time": teacher,
            "teacher_loss": sum(teacher) / len(teacher),
        }

    def _both(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Losses `(B,)` against the teacher and against the data, of one evaluation of the student."""
        assert batch.clusters is not None and batch.draws is not None
        x_t = noisy(batch.x0, batch.eps, batch.t, self.schedule)
        with torch.no_grad():
            v = self.teacher.velocity(x_t, batch.t, batch.cond, batch.clusters, batch.draws)
        output = self.family.predict(self.network, x_t, batch.t, batch.cond)
        data = target(batch.x0, batch.eps, batch.t, self.schedule, "v")
        return per_sample_loss(output, v), per_sample_loss(output, data)

    def _all_with_draws(self, batches: list[Batch]) -> Iterator[Batch]:
        first = 0
        for batch in batches:
            yield self._with_draws(batch, 0, range(first, first + len(batch.t)))
            first += len(batch.t)

    def _with_draws(self, batch: Batch, seed: int, positions: range) -> Batch:
        return replace(batch, draws=uniforms(seed, "teacher", positions, (self.teacher.draws,)))
