"""Ways to guide: what a velocity leads away from, how far, and when; and which of them holds.

Of a state, v(c) is the chosen expert's velocity with the caption, v(0) its velocity without; v(null) is
that of what guidance leads away from: the expert itself (`own`), an expert drawn from p(k | x_t, t, null)
(`mixture`), the network of shared pretraining (`pretrain`), one network of the experts' averaged weights
(`average`), what shared pretraining or the single network was at its N-th milestone (`milestone N`), or what
the expert itself was (`own milestone N`). The guided velocity is

    v(null) + cluster (v(0) - v(null)) + caption (v(c) - v(0)),

which with one scale for both is ordinary guidance. Outside `interval` it is v(c).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from diffusers.schedulers.scheduling_flow_match_heun_discrete import FlowMatchHeunDiscreteScheduler
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from atoll.base.condition import Condition, Denoiser
from atoll.base.rng import uniforms
from atoll.campaign.folder import Campaign
from atoll.campaign.milestones import TrainingRun
from atoll.campaign.runs import Run, experts_of
from atoll.encoders.vision import extractor
from atoll.export.call import set_times
from atoll.measure.metrics.metric import How
from atoll.measure.models import Candidate, Drawn, RowConditions, generation_of, published, samples_of
from atoll.measure.pictures import Batch
from atoll.measure.points import Judge, reference_of
from atoll.model.bank import Bank
from atoll.model.checkpoint import Checkpoint
from atoll.model.dispatch import Dispatch, Networks, route
from atoll.model.expert import Expert
from atoll.model.generate import Batch as Latents
from atoll.model.generate import Conditions
from atoll.model.generation import Generation
from atoll.model.model import Model
from atoll.model.routing import Routing
from atoll.model.sampler import Sampler

DRAW = Routing.named("sample-1")
ALWAYS = (0.0, 1.0)


@dataclass(frozen=True)
class Way:
    """How a velocity is guided."""

    null: str = "own"
    """What guidance leads away from."""
    caption: float = 2.0
    """Scale of v(c) - v(0)."""
    cluster: float | None = None
    """Scale of v(0) - v(null); the caption's by default, and v(0) is then not needed."""
    interval: tuple[float, float] = ALWAYS
    """Times t at which there is guidance."""
    routing: str = "top-1"
    """Of the conditional branch, of an ensemble."""
    steps: int = 20
    shift: float = 1.0
    """SD3's time shift."""
    heun: bool = False
    """Whether every step asks the networks twice, on diffusers' own grid; else Euler's steps."""
    averaged: int = 1
    """Last milestones of every network, the end among them, whose weights are averaged."""

    @property
    def name(self) -> str:
        """For tables: what is not as by default."""
        scales = f"{self.caption:g}" + ("" if self.cluster is None else f", cluster {self.cluster:g}")
        words = {
            f"{self.routing}, null {self.null}, guidance {scales}": True,
            f"at t {self.interval[0]:g} to {self.interval[1]:g}": self.interval != ALWAYS,
            f"{self.steps} steps": self.steps != 20,
            "Heun": self.heun,
            f"shift {self.shift:g}": self.shift != 1,
            f"mean of the last {self.averaged} milestones": self.averaged > 1,
        }
        return ", ".join(word for word, told in words.items() if told)


class GuidedSampler(Sampler):
    """A batch in flight under a way of guiding.

    Args:
        way: how it is guided.
        others: what guidance leads away from beside the model: one network, or one for each expert.
        rest: as of a sampler.
    """

    def __init__(self, way: Way, others: Sequence[Denoiser], *rest: Any, **more: Any) -> None:
        if way.heun:
            heun = FlowMatchHeunDiscreteScheduler(shift=way.shift)
            more["scheduler"], _ = set_times(heun, way.steps, rest[-1].shape[1:])
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
        # A draw of its own: with the conditional branch's, both would agree more often than chance has it.
        positions, seed = [row.position for row in self.rows], self.rows[0].generation.seed
        draws = uniforms(seed, f"route-null/{self.rows[0].step}", positions, (1,))
        logits = self.bank.logits(x_t, t, self.null)
        return Dispatch(route(DRAW, logits, draws.to(logits)), self.null).run(self.bank, x_t, t)


class GuidedByThemselves(Model):
    """Experts of which each leads away from what it was itself, `earlier`, by number."""

    def __init__(self, model: Model, earlier: Sequence[Denoiser]) -> None:
        super().__init__(model.bank, model.card, model.device, vae=model.vae)
        self.earlier = earlier

    def generate(
        self, conditions: Conditions, generation: Generation | None = None, *rest: Any, **how: Any
    ) -> Iterator[Latents]:
        """Draw samples, batch by batch."""
        way = Way("own milestone 1", (generation or self.generation).guidance)
        how["sampler"] = partial(GuidedSampler, way, self.earlier)
        return super().generate(conditions, generation, *rest, **how)


def with_bank(model: Model, bank: Bank) -> Model:
    """The model with other networks, and its own autoencoder, which may be a folder of the campaign."""
    return Model(bank, model.card, model.device, vae=model.vae)


def earlier(campaign: Campaign, run: Run, number: int = 0) -> tuple[Expert, str]:
    """A network as it was at a milestone of its run, from 0 or from the end; its checkpoint's digest.

    Raises:
        LookupError: the run kept fewer milestones.
    """
    origin = TrainingRun.of(campaign.store, run.network, f"{run.folder}/run")
    if not -len(origin.milestones) <= number < len(origin.milestones):
        raise LookupError(f"{run.name} of {campaign.store.location} kept {len(origin.milestones)} milestones")
    milestone = origin.milestones[number]
    return origin.stored(milestone).expert(), milestone.sha256


def mean(experts: Sequence[Expert]) -> Expert:
    """One network of the experts' averaged weights."""
    average = AveragedModel(experts[0].network)
    for expert in experts:
        average.update_parameters(expert.network)
    return replace(experts[0], network=average.module, replayed=None)  # that asks the first one's network


# Which way holds.

SCALES = (1.5, 2.0, 3.0, 4.0)
INTERVALS = ((0.0, 0.85), (0.2, 1.0), (0.2, 0.85))


def _intervals(*nulls: str, routing: str = "top-1") -> list[Way]:
    return [Way(null, scale, None, at, routing) for null in nulls for scale in (3.0, 4.0) for at in INTERVALS]


def _sampled_otherwise(null: str) -> list[Way]:
    ways = [Way(null, 3.0, steps=40), *(Way(null, 3.0, steps=steps, heun=True) for steps in (10, 20))]
    ways += [Way(null, 3.0, shift=shift) for shift in (1.5, 2.0)]
    return ways + [Way(null, 3.0, averaged=last) for last in (2, 3)]


WAYS = {
    "ensemble": [
        *(Way(null, scale) for null in ("own", "mixture", "pretrain", "average") for scale in SCALES),
        *(Way(null, scale, routing="once") for null in ("mixture", "pretrain") for scale in SCALES),
        *(
            Way(f"{kind}milestone {number}", scale, routing="once")
            for kind in ("", "own ")
            for number in (1, 2, 4)
            for scale in SCALES
        ),
        *(Way("mixture", caption, cluster) for caption in (1.5, 2.0, 3.0) for cluster in SCALES),
        *_intervals("mixture"),
        *_intervals("milestone 2", routing="once"),
        *_sampled_otherwise("mixture"),
    ],
    "monolith": [
        *(
            Way(f"milestone {number}" if number else "own", scale)
            for number in (0, 1, 2, 4)
            for scale in SCALES
        ),
        *_intervals("own", "milestone 1"),
        *_sampled_otherwise("own"),
    ],
}


@dataclass
class Guided(Drawn):
    """Pictures that a model draws under a way of guiding, away from `others` beside the model."""

    way: Way = field(default_factory=Way)
    others: Sequence[Denoiser] = ()

    @property
    def subject(self) -> dict[str, Any]:
        """The model's, and the way, so that a point is never taken for one of plain guidance."""
        return {**super().subject, "way": self.way.name}

    def batches(self, part: range, batch: int) -> Iterator[Batch]:
        """Pictures in batches."""
        model, sampler = self.candidate.model, partial(GuidedSampler, self.way, self.others)
        how = {"first": part.start, "batch": batch, "sampler": sampler}
        for drawn in model.generate(self.conditions.of_model, self.generation, len(part), **how):
            yield Batch(drawn.rows, model.pictures(drawn.latents, drawn.rows))


@dataclass
class Bench:
    """The ensemble or the monolith of a campaign, and all that its ways are measured with."""

    folder: Path
    name: str
    samples: int
    split: str
    size: int = 64
    """Side in pixels that the judge sees."""
    router: Path | None = None
    """A campaign on the same clusters, whose router takes the place of the ensemble's."""

    @cached_property
    def campaign(self) -> Campaign:
        """The campaign."""
        return Campaign.open(str(self.folder))

    @cached_property
    def candidate(self) -> Candidate:
        """The model."""
        known = published(self.campaign, self.name, torch.device("cpu"))
        if self.router is None:
            return known
        other = Checkpoint.of_run(Campaign.open(str(self.router)).store, "router")
        bank, weights = known.model.bank, {**known.weights, "router": other.card.weights_sha256}
        routed = Bank(bank.experts, other.router(), bank.missing, bank.costs, bank.pretrain)
        return replace(known, weights=weights, model=with_bank(known.model, routed))

    @cached_property
    def conditions(self) -> RowConditions:
        """Captions of the split."""
        rows = samples_of(self.campaign, self.campaign.dataset(), self.split, self.candidate.model.card)
        return RowConditions.drawn(self.campaign, rows, self.split, self.samples, 0)

    @cached_property
    def judge(self) -> Judge:
        """Fréchet distance on 64 components of the campaign's extractor."""
        encoder = extractor(self.campaign.config.evaluate.extractor, self.size, "cpu")
        held = reference_of(None, self.split, self.campaign, encoder, self.campaign.store)
        components = min(64, held.about.count // 2, self.samples // 2)
        how = How(encoder.name, encoder.kind, encoder.width, self.samples, held.about.count, components)
        return Judge(self.campaign.store, encoder, held, ("frechet", "precision", "recall"), how, 64)

    @property
    def shared(self) -> bool:
        """Whether experts have a common start."""
        return bool(self.campaign.config.budget.pretrain)

    @property
    def case(self) -> str:
        """For tables."""
        case = f"{self.name}, nothing shared" if self.name == "ensemble" and not self.shared else self.name
        return f"{case}, router of {self.router.name}" if self.router else case

    @property
    def whole(self) -> Run:
        """The run of a network on all the data: the monolith's, or shared pretraining's."""
        if self.name == "ensemble" and not self.shared:
            raise LookupError(f"{self.folder.name} shares no pretraining")
        return Run("pretrain" if self.name == "ensemble" else "monolith")

    def others(self, null: str) -> list[Denoiser]:
        """What guidance leads away from beside the model; `LookupError` where there is none."""
        match null.split():
            case ["pretrain"]:
                return [Checkpoint(self.campaign.store, self.whole.network).expert()]
            case ["average"]:
                if not self.shared:
                    raise LookupError(f"experts of {self.folder.name} have no common start")
                experts = self.candidate.model.bank.experts
                every = (experts[number] for number in range(len(experts)))
                return [mean([expert for expert in every if isinstance(expert, Expert)])]
            case ["milestone", number]:
                return [earlier(self.campaign, self.whole, int(number) - 1)[0]]
            case ["own", "milestone", number]:
                runs = experts_of(self.campaign.config.partition.k)
                return [earlier(self.campaign, run, int(number) - 1)[0] for run in runs]
        return []

    def averaged(self, last: int) -> Candidate:
        """The model, of whose every network the last milestones are averaged."""
        if last == 1:
            return self.candidate
        runs = experts_of(self.campaign.config.partition.k) if self.name == "ensemble" else [self.whole]
        means = [mean([earlier(self.campaign, run, -n)[0] for n in range(1, last + 1)]) for run in runs]
        model = self.candidate.model
        bank = Bank(means, model.bank.router, pretrain=model.bank.pretrain)
        return replace(self.candidate, model=with_bank(model, bank))

    def measured(self, way: Way) -> dict[str, float]:
        """Metrics of a way; `LookupError` where the campaign has not what it takes."""
        generation = generation_of(self.campaign).with_(
            routing=way.routing, guidance=max(2.0, way.caption), steps=way.steps, shift=way.shift, seed=0
        )
        candidate, others = self.averaged(way.averaged), self.others(way.null)
        source = Guided(candidate, generation, self.conditions, way=way, others=others)
        point = self.judge.measure(source).point
        assert point is not None
        return {name: value.value for name, value in point.values.items()}
