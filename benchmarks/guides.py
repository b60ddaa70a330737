"""Ways to guide: what a velocity leads away from, how far, and when.

Of a state, v(c) is the chosen expert's velocity with the caption, v(0) its velocity without; v(null) is
that of what guidance leads away from: the expert itself (`own`), an expert drawn from p(k | x_t, t, null)
(`mixture`), the network of shared pretraining (`pretrain`), one network of the experts' averaged weights
(`average`), what shared pretraining or the single network was at its N-th milestone (`milestone N`), or what
the expert itself was (`own milestone N`). The guided velocity is

    v(null) + cluster (v(0) - v(null)) + caption (v(c) - v(0)),

which with one scale for both is ordinary guidance. Outside `interval` it is v(c).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler
from torch import Tensor

from atoll.base.condition import Condition, Denoiser
from atoll.base.rng import uniforms
from atoll.campaign.folder import Campaign
from atoll.campaign.milestones import TrainingRun
from atoll.campaign.runs import Run
from atoll.export.call import set_times
from atoll.model.dispatch import Dispatch, Networks
from atoll.model.expert import Expert
from atoll.model.generate import Batch, Conditions
from atoll.model.generation import Generation
from atoll.model.model import Model
from atoll.model.route import route
from atoll.model.routing import Routing
from atoll.model.sampler import Sampler

DRAW = Routing.named("sample-1")


@dataclass(frozen=True)
class Way:
    """How a velocity is guided.

    Attributes:
        null: what guidance leads away from.
        caption: scale of v(c) - v(0).
        cluster: scale of v(0) - v(null); the caption's by default, and v(0) is then not needed.
        interval: times t at which there is guidance.
        routing: of the conditional branch, of an ensemble.
        steps: of the sampler.
        shift: SD3's time shift.
        heun: whether every step asks the networks twice, on diffusers' own grid; else Euler's steps.
        averaged: last milestones of every network, the end among them, whose weights are averaged.
    """

    null: str = "own"
    caption: float = 2.0
    cluster: float | None = None
    interval: tuple[float, float] = (0.0, 1.0)
    routing: str = "top-1"
    steps: int = 20
    shift: float = 1.0
    heun: bool = False
    averaged: int = 1

    @property
    def name(self) -> str:
        """For tables."""
        scales = (
            f"{self.caption:g}" if self.cluster is None else f"{self.caption:g}, cluster {self.cluster:g}"
        )
        low, high = self.interval
        words = [self.routing, f"null {self.null}", f"guidance {scales}"]
        words += [f"at t {low:g} to {high:g}"] if self.interval != (0.0, 1.0) else []
        words += [f"{self.steps} steps"] if self.steps != 20 else []
        words += ["Heun"] if self.heun else []
        words += [f"shift {self.shift:g}"] if self.shift != 1 else []
        words += [f"mean of the last {self.averaged} milestones"] if self.averaged > 1 else []
        return ", ".join(words)


class GuidedSampler(Sampler):
    """A batch in flight under a way of guiding.

    Args:
        way: how it is guided.
        others: what guidance leads away from beside the model: one network, or one for each expert.
        rest: as of a sampler.
    """

    def __init__(self, way: Way, others: Sequence[Denoiser], *rest: Any, **more: Any) -> None:
        if way.heun:
            more["scheduler"] = FlowMatchHeunDiscreteScheduler(shift=way.shift)
            set_times(more["scheduler"], way.steps)
        super().__init__(*rest, **more)
        self.way, self.others = way, others

    def velocity(self, x_t: Tensor, t: Tensor) -> Tensor:
        """Guided velocity."""
        way, (low, high) = self.way, self.way.interval
        conditional = self._served(x_t, t, self.cond)
        if (way.caption == 1 and way.cluster in (None, 1)) or not low <= float(t[0]) <= high:
            return conditional
        away = self._null(x_t, t)
        if way.cluster is None:
            return away + way.caption * (conditional - away)
        own = self._served(x_t, t, self.null)
        return away + way.cluster * (own - away) + way.caption * (conditional - own)

    def _served(self, x_t: Tensor, t: Tensor, cond: Condition, networks: Networks | None = None) -> Tensor:
        """Velocity of the network that serves the picture."""
        assert self.weights is not None
        return Dispatch(self.weights.to(x_t), cond).run(networks or self.bank, x_t, t)

    def _null(self, x_t: Tensor, t: Tensor) -> Tensor:
        if self.way.null == "own":
            return self._served(x_t, t, self.null)
        if len(self.others) == 1:
            return self.others[0].velocity(x_t, t, self.null)
        if self.others:
            return self._served(x_t, t, self.null, self.others)
        positions, seed = [row.position for row in self.rows], self.rows[0].generation.seed
        draws = uniforms(seed, f"route-null/{self.rows[0].step}", positions, (1,))
        logits = self.bank.logits(x_t, t, self.null)
        return Dispatch(route(DRAW, logits, draws.to(logits)), self.null).run(self.bank, x_t, t)


class GuidedByThemselves(Model):
    """Experts of which each leads away from what it was itself.

    Args:
        rest: as of a model.
        earlier: what the experts were, by number.
    """

    def __init__(self, *rest: Any, earlier: Sequence[Denoiser]) -> None:
        super().__init__(*rest)
        self.earlier = earlier

    def generate(
        self, conditions: Conditions, generation: Generation | None = None, *rest: Any, **how: Any
    ) -> Iterator[Batch]:
        """Draw samples, batch by batch."""
        way = Way("own milestone 1", (generation or self.generation).guidance)
        how["sampler"] = partial(GuidedSampler, way, self.earlier)
        return super().generate(conditions, generation, *rest, **how)


def earlier(campaign: Campaign, run: Run, number: int = 0) -> tuple[Expert, str]:
    """A network as it was at a milestone of its training, and the checkpoint's digest.

    Args:
        campaign: whose run it is.
        run: of the network.
        number: of the milestone, from 0, or from the end, -1.

    Raises:
        LookupError: the run kept fewer milestones.
    """
    origin = TrainingRun.of(campaign.store, run.network, f"{run.folder}/run")
    if not -len(origin.milestones) <= number < len(origin.milestones):
        raise LookupError(f"{run.name} of {campaign.store.location} kept {len(origin.milestones)} milestones")
    kept = origin.milestones[number]
    return origin.load(kept), kept.sha256
