"""Ways to guide: what a velocity leads away from, how far, and when.

Of a state, v(c) is the chosen expert's velocity with the caption, v(0) its velocity without; v(null) is
that of what guidance leads away from: the expert itself (`own`), an expert drawn from p(k | x_t, t, null)
(`mixture`), the network of shared pretraining (`pretrain`), one network of the experts' averaged weights
(`average`), what shared pretraining or the single network was at its N-th milestone (`milestone N`), or what
the expert itself was (`own milestone N`). The guided velocity is

    v(null) + cluster (v(0) - v(null)) + caption (v(c) - v(0)),

which with one scale for both is ordinary guidance. Outside `interval` it is v(c).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from atoll.base.condition import Condition, Denoiser
from atoll.base.rng import Position, uniforms
from atoll.campaign.folder import Campaign
from atoll.campaign.milestones import Origin
from atoll.campaign.runs import Run
from atoll.model.dispatch import Dispatch
from atoll.model.ensemble import Ensemble
from atoll.model.expert import Expert
from atoll.model.field import RoutedField, SingleField
from atoll.model.generation import Generation
from atoll.model.route import route
from atoll.model.routing import Routing

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


class GuidedField:
    """The flow of one batch under a way of guiding.

    Args:
        inner: the batch's field: networks, conditions, and places in the random streams.
        way: how it is guided.
        others: what guidance leads away from beside the model: one network, or one for each expert.
    """

    def __init__(self, inner: RoutedField | SingleField, way: Way, others: Sequence[Denoiser]) -> None:
        self.inner, self.way, self.others = inner, way, others
        self.cond, self.null = inner.branches.cond, inner.branches.null
        self.trace = inner.trace if isinstance(inner, RoutedField) else None
        self.weights: Tensor | None = None

    def __call__(self, x_t: Tensor, t: float, step: int) -> Tensor:
        """Guided velocity."""
        way, low, high = self.way, *self.way.interval
        times = x_t.new_full((len(x_t),), t)
        conditional = self._chosen(x_t, times, step, self.cond)
        if (way.caption == 1 and way.cluster in (None, 1)) or not low <= t <= high:
            return conditional
        away = self._null(x_t, times, step)
        if way.cluster is None:
            return away + way.caption * (conditional - away)
        own = self._chosen(x_t, times, step, self.null)
        return away + way.cluster * (own - away) + way.caption * (conditional - own)

    def _chosen(self, x_t: Tensor, times: Tensor, step: int, cond: Condition) -> Tensor:
        """Velocity of the network that serves the picture."""
        if isinstance(self.inner, SingleField):
            return self.inner.denoiser.velocity(x_t, times, cond)
        field = self.inner
        if cond is self.cond and (self.weights is None or field.generations[0].routing.asks_at(step)):
            self.weights = field.weights_at(x_t, float(times[0]), step)
        assert self.weights is not None
        return Dispatch(self.weights, cond).run(field.ensemble.experts, x_t, times)

    def _null(self, x_t: Tensor, times: Tensor, step: int) -> Tensor:
        if self.way.null == "own":
            return self._chosen(x_t, times, step, self.null)
        if len(self.others) == 1:
            return self.others[0].velocity(x_t, times, self.null)
        assert isinstance(self.inner, RoutedField)
        if self.others:
            assert self.weights is not None
            return Dispatch(self.weights, self.null).run(self.others, x_t, times)
        rows: Sequence[Position] = self.inner.positions
        draws = uniforms(self.inner.generations[0].seed, f"route-null/{step}", rows, (1,))
        logits = self.inner.ensemble.logits(x_t, times, self.null)
        return Dispatch(route(DRAW, logits, draws.to(logits)), self.null).run(
            self.inner.ensemble.experts, x_t, times
        )


class GuidedByThemselves(Ensemble):
    """Experts of which each leads away from what it was itself.

    Args:
        ensemble: the experts and their router.
        earlier: what they were, by number.
    """

    def __init__(self, ensemble: Ensemble, earlier: Sequence[Denoiser]) -> None:
        super().__init__(ensemble.experts, ensemble.router, ensemble.missing)
        self.earlier = earlier

    def field(self, cond: Condition, null: Condition, generation: Generation, *rest: Any) -> Any:
        """What a sampler follows for one batch; see `Ensemble.field`."""
        inner = super().field(cond, null, generation, *rest)
        if generation.guidance == 1:
            return inner  # of the router alone, before a batch is formed
        return GuidedField(inner, Way("own milestone 1", generation.guidance), self.earlier)


def earlier(campaign: Campaign, run: Run, number: int = 0) -> tuple[Expert, str]:
    """A network as it was at a milestone of its training, and the checkpoint's digest.

    Args:
        campaign: whose run it is.
        run: of the network.
        number: of the milestone, from 0, or from the end, -1.

    Raises:
        LookupError: the run kept fewer milestones.
    """
    origin = Origin.of(campaign.store, run.network, f"{run.folder}/run")
    if not -len(origin.milestones) <= number < len(origin.milestones):
        raise LookupError(f"{run.name} of {campaign.store.location} kept {len(origin.milestones)} milestones")
    kept = origin.milestones[number]
    return origin.load(kept), kept.sha256
