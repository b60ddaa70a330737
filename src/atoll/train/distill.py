"""Distillation: one dense network learns the flow of all experts. It needs no router when it is used.

The teacher of a training sample is the expert of the sample's own cluster (DDM, "Distillation"), or, on
request, the ensemble as it is sampled, with the router's weights and guidance. Teachers are denoisers:
whatever they predict on whatever schedule, the student learns their rectified-flow velocity.

A student of N steps learns it on average over each of its steps: at the N times of its sampler, where the
teacher's path leads to at the next one (progressive distillation, arXiv 2202.00512 and 2210.03142, with all
halvings at once). Euler's method with N steps then follows the teacher's path of many.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.base.console import say
from atoll.base.device import onto
from atoll.base.errors import ConfigError, PartitionError
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import publish_initial
from atoll.campaign.runs import Run, RunPlan, experts_of
from atoll.campaign.settings.train import VALIDATION_TIMES, StudentConfig
from atoll.flow.objective import noisy, per_sample_loss
from atoll.flow.schedule import RectifiedFlow, expand
from atoll.model.bank import Bank
from atoll.model.card import Card, check_place, check_together
from atoll.model.checkpoint import Checkpoint
from atoll.model.foreign import compare
from atoll.model.generation import Generation
from atoll.model.model import load_experts
from atoll.model.sampler import Row, Sampler, times
from atoll.store.store import Store
from atoll.train.rows import Batch, TrainingRows
from atoll.train.tasks import DenoiserTask, validation

Teach = Callable[[Batch], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Teacher:
    """The experts as they are sampled; by the clusters of the samples where the routing is `oracle`.

    A student of few `steps` learns from paths of `generation.steps`, a multiple of them.
    """

    bank: Bank
    generation: Generation
    null: Condition
    steps: int | None = None

    def teach(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """States `(B, C, H, W)`, their times `(B,)`, and the velocities to learn there."""
        how = self.generation.at(*batch.x0.shape[2:])
        # Clusters are fetched from a GPU only where they are asked for.
        asked = batch.clusters if how.routing.needs_labels else None
        rows = Row.each(how, batch.positions, None if asked is None else asked.tolist())
        t = end = batch.t
        if self.steps is not None:
            # Every step is as likely as the others, and begins where a sampler evaluates the network.
            number = ((1 - batch.t) * self.steps).long().clamp(0, self.steps - 1)
            grid = batch.t.new_tensor(times(self.steps, how.shift))
            t, end = grid[number], grid[number + 1]
            for row, n in zip(rows, number.tolist(), strict=True):
                row.step = n * (how.steps // self.steps)
        x_t = noisy(batch.x0, batch.eps, t, RectifiedFlow())
        sampler = Sampler(self.bank, batch.cond.widened(), self.null, rows, x_t)
        if self.steps is None:
            return x_t, t, sampler.flow(x_t, t)
        for _ in range(how.steps // self.steps):
            sampler.advance()
        return x_t, t, (x_t - sampler.x) / expand(t - end, x_t)


class DistillTask(DenoiserTask):
    """The student learns from a teacher on the same device; the objective is v on rectified flow.

    Rows come with clusters. Answers that several steps learn from wait on the host.
    """

    def __init__(
        self, network: nn.Module, rows: TrainingRows, teacher: Teacher, settings: StudentConfig
    ) -> None:
        super().__init__(network, rows)
        self.teacher, self.settings = teacher, settings
        # First position, times and velocities; the states follow from the batch, which halves the memory.
        self._answers: dict[int, tuple[int, Tensor, Tensor]] = {}

    def batch(self, positions: range) -> Batch:
        """The samples at these positions, or those of an earlier step that come again."""
        step, offset = divmod(positions.start, self.recipe.plan.batch)
        start = self.settings.learns_from(step, self.recipe.plan.steps) * self.recipe.plan.batch + offset
        return super().batch(range(start, start + len(positions)))

    def step(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Mean squared error against the teacher's velocity, mixed with that against the data's."""
        taught, data = (losses.mean() for losses in self._both(batch, self._taught))
        if not (weight := self.settings.data_weight):
            return taught, {}
        metrics = {"teacher_loss": float(taught.detach()), "data_loss": float(data.detach())}
        return torch.lerp(taught, data, weight), metrics

    def validate(self) -> dict[str, Any]:
        """Loss on held-out rows against the data and the teacher, at the times that training asks it at."""
        asked = at = VALIDATION_TIMES
        steps = self.teacher.steps
        if steps is not None:  # within each of its steps a time, and where that step begins
            how = self.teacher.generation.at(*self.rows.train.shape.usual)
            asked, at = tuple((n + 0.5) / steps for n in range(steps)), times(steps, how.shift)[-2::-1]
        losses = [[float(part.mean()) for part in both] for both in self._heldout(self._both, asked)]
        taught, data = ([pair[n] for pair in losses] for n in range(2))
        return validation(data, at, teacher_by_time=taught, teacher_loss=sum(taught) / max(1, len(taught)))

    def _taught(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        # The teacher is asked once for a batch, and again after a resume: of the same one, so bits are alike.
        if self.settings.reuse == 1:
            return self.teacher.teach(batch)
        first, plan = batch.positions[0][1], self.recipe.plan
        slot = first % (self.settings.kept(plan.steps) * plan.batch)
        if (known := self._answers.get(slot)) is None or known[0] != first:
            _, t, v = self.teacher.teach(batch)
            known = self._answers[slot] = first, t.cpu(), v.cpu()
        t, v = (onto(part, self.device) for part in known[1:])
        return noisy(batch.x0, batch.eps, t, RectifiedFlow()), t, v

    def _both(self, batch: Batch, teach: Teach | None = None) -> tuple[Tensor, Tensor]:
        # Losses `(B,)` against the teacher and against the data, of one evaluation of the student.
        with torch.no_grad():
            x_t, t, v = (teach or self.teacher.teach)(batch)
        output = self.family.predict(self.network, x_t, t, batch.cond)
        return per_sample_loss(output, v), per_sample_loss(output, batch.eps - batch.x0)


def teachers(campaign: Campaign, plan: RunPlan) -> dict[str, Card]:
    """Cards of all that the student learns from, checked: experts by their folders, perhaps the router."""
    store, config = campaign.store, campaign.config
    experts = experts_of(config.partition.k)
    # A part of the experts will not do: the student would learn a part of the data, and which part would
    # depend on when it was started.
    absent = [run.expert for run in experts if not run.published(store)]
    anew = "train them anew, without their run/ and expert/, then take them out"
    for lacking, why, fix in (
        (absent, "not published", "train them first: atoll launch"),
        (config.quarantine, "in quarantine", anew),
    ):
        if lacking:
            of = f"the student learns from all experts, and of {len(experts)} in {store.location} these are"
            raise PartitionError(f"{of} {why}: {', '.join(map(str, lacking))}", fix)
    cards = {run.folder: Checkpoint(store, run.network).card for run in experts}
    for run in experts:
        check_place(cards[run.folder], run.name, run.folder)
    if "router" in Run("student").kind.needs(config):
        cards["router"] = Checkpoint.of_run(store, "router").card
    for folder in cards if config.trusted else ():
        Checkpoint(store, f"{folder}/expert").check_trusted(config.trusted)
    check_together(list(cards.values()))
    if cards[experts[0].folder].partition != plan.partition:
        what = f"the experts in {store.location} were made for another partition than the student"
        raise PartitionError(what, "put their own back")
    return cards


def load_teacher(campaign: Campaign, null: Condition, device: torch.device) -> Teacher:
    """Load what `teachers` found, on the device as far as `student.residency` allows."""
    settings, store, k = campaign.config.student, campaign.store, campaign.config.partition.k
    assert settings is not None
    parts = {number: Checkpoint(store, run.network) for number, run in enumerate(experts_of(k))}
    router = Checkpoint(store, "router/expert").router(device) if settings.teacher == "routed" else None
    bank = Bank(load_experts(parts, k, settings.residency, device), router)
    how = settings.teaching(campaign.config.objective.time.shift)
    return Teacher(bank, how, null.to(device), settings.steps)


def write_initial_weights(
    campaign: Campaign, run: Store, plan: RunPlan, network: nn.Module, cards: Mapping[str, Card]
) -> None:
    """Write `student/init/` from the experts, where it is not there: their average, or one of them.

    The store is narrowed to the student's folder, and its network is changed in place. Cards are those of the
    experts, by folder; `ConfigError` where an expert's network is another one than the student's.
    """
    assert campaign.config.student is not None
    start, number = campaign.config.student.origin()
    experts = experts_of(campaign.config.partition.k)
    sources = [source for source in experts if number in (None, source.expert)]

    def average() -> dict[str, Tensor]:
        total: dict[str, Tensor] = {}
        for source in sources:  # one is read at a time: K of them may be more than the memory
            weights = Checkpoint(campaign.store, source.network).read()[1]
            fit = compare(network, weights)
            if others := [*fit.drawn, *fit.unused]:
                of = f"the network of {source.folder} is another one than the student's ({others[0]})"
                raise ConfigError(f"student.start: {of}", "remove student/, and set student.start: scratch")
            for name, value in weights.items():  # in float64, so that their order does not show
                total[name] = total[name] + value.double() if name in total else value.double()
        return {name: (value / len(sources)).float() for name, value in total.items()}

    hashes = {source.folder: cards[source.folder].weights_sha256 for source in sources}
    origin: dict[str, Any] = {"start": start, "experts": hashes}
    if publish_initial(run, network, "experts", origin, plan.partition, average, "the experts") is not None:
        source = "the average of the experts" if start == "average" else sources[0].folder
        say(f"student: starts from {source}")
