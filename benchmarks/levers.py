"""Ways to guide islands and single networks, on campaigns that are trained: which of them holds?

    python benchmarks/levers.py --campaign DIR --single DIR [--only TEXT ...] [--split test] [--samples 500]
    python benchmarks/levers.py --quick

Every way is a formula of velocities that the networks already give, so nothing is trained. Ways are chosen
on held-out pictures of one seed (`--split heldout`) and judged on test pictures of others. Points are kept
in the campaigns, so a run that was stopped goes on. `guides.py` has the formula.
"""

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from guides import GuidedSampler, Way, earlier
from harness import finish, row, tiny
from torch.optim.swa_utils import AveragedModel

from atoll.base.condition import Denoiser
from atoll.base.threads import using_threads
from atoll.campaign.folder import Campaign
from atoll.campaign.runs import Run, experts_of
from atoll.campaign.settings.measure import EvaluateConfig
from atoll.encoders.vision import extractor
from atoll.measure.metrics.metric import How
from atoll.measure.models import Candidate, Drawn, RowConditions, published, samples_of
from atoll.measure.override import generation_of
from atoll.measure.pictures import Batch
from atoll.measure.points import Judge
from atoll.measure.reference import reference
from atoll.model.bank import Bank
from atoll.model.checkpoint import Checkpoint
from atoll.model.expert import Expert
from atoll.model.model import Model

SCALES = (1.5, 2.0, 3.0, 4.0)
INTERVALS = ((0.0, 0.85), (0.2, 1.0), (0.2, 0.85))
ENSEMBLE = [
    *(Way(null, scale) for null in ("own", "mixture", "pretrain", "average") for scale in SCALES),
    *(Way("mixture", scale, routing="once") for scale in SCALES),
    *(Way("pretrain", scale, routing="once") for scale in SCALES),
    *(
        Way(f"{kind}milestone {number}", scale, routing="once")
        for kind in ("", "own ")
        for number in (1, 2, 4)
        for scale in SCALES
    ),
    *(Way("mixture", caption, cluster) for caption in (1.5, 2.0, 3.0) for cluster in (1.5, 2.0, 3.0, 4.0)),
    *(Way("mixture", scale, interval=at) for scale in (3.0, 4.0) for at in INTERVALS),
    *(Way("milestone 2", scale, interval=at, routing="once") for scale in (3.0, 4.0) for at in INTERVALS),
    *(Way("mixture", 3.0, steps=steps) for steps in (40,)),
    *(Way("mixture", 3.0, steps=steps, heun=True) for steps in (10, 20)),
    *(Way("mixture", 3.0, shift=shift) for shift in (1.5, 2.0)),
    *(Way("mixture", 3.0, averaged=last) for last in (2, 3)),
]
SINGLE = [
    *(Way(null, scale) for null in ("own", "milestone 1", "milestone 2", "milestone 4") for scale in SCALES),
    *(
        Way(null, scale, interval=at)
        for null in ("own", "milestone 1")
        for scale in (3.0, 4.0)
        for at in INTERVALS
    ),
    *(Way("own", 3.0, steps=steps) for steps in (40,)),
    *(Way("own", 3.0, steps=steps, heun=True) for steps in (10, 20)),
    *(Way("own", 3.0, shift=shift) for shift in (1.5, 2.0)),
    *(Way("own", 3.0, averaged=last) for last in (2, 3)),
]


@dataclass
class Guided(Drawn):
    """Pictures that a model draws under a way of guiding.

    Attributes:
        way: how it is guided.
        others: what guidance leads away from beside the model.
    """

    way: Way = field(default_factory=Way)
    others: Sequence[Denoiser] = ()

    @property
    def subject(self) -> dict[str, Any]:
        """The model's, and the way, so that a point is never taken for one of plain guidance."""
        return {**super().subject, "way": self.way.name}

    def batches(self, part: range, batch: int) -> Iterator[Batch]:
        """Pictures in batches."""
        model = self.candidate.model
        drawn = model.generate(
            self.conditions.of_model,
            self.generation,
            len(part),
            first=part.start,
            batch=batch,
            sampler=partial(GuidedSampler, self.way, self.others),
        )
        for one in drawn:
            yield Batch(one.rows, model.pictures(one.latents, one.rows))


@dataclass
class Bench:
    """A campaign's model, and all that its ways are measured with."""

    folder: Path
    name: str
    samples: int
    split: str

    @cached_property
    def campaign(self) -> Campaign:
        """The campaign."""
        return Campaign.open(str(self.folder))

    @cached_property
    def candidate(self) -> Candidate:
        """The model."""
        return published(self.campaign, self.name, torch.device("cpu"))

    @cached_property
    def conditions(self) -> RowConditions:
        """Captions of the split."""
        rows = samples_of(self.campaign, self.campaign.dataset(), self.split, self.candidate.model.card)
        return RowConditions.drawn(self.campaign, rows, self.split, self.samples, 0)

    @cached_property
    def judge(self) -> Judge:
        """Fréchet distance on 64 components of the campaign's extractor at 64 pixels."""
        config: EvaluateConfig = self.campaign.config.evaluate
        encoder = extractor(config.extractor, 64, "cpu")
        held = reference(None, self.split, self.campaign, encoder, self.campaign.store)
        components = min(64, held.about.count // 2, self.samples // 2)
        how = How(encoder.name, encoder.kind, encoder.width, self.samples, held.about.count, components)
        return Judge(self.campaign.store, encoder, held, ("frechet", "precision", "recall"), how, 64)

    def others(self, null: str) -> list[Denoiser]:
        """What guidance leads away from beside the model; `LookupError` where there is none."""
        match null.split():
            case ["pretrain"]:
                return [Checkpoint(self.campaign.store, self.whole.network).expert()]
            case ["average"]:
                return [self._average()]
            case ["milestone", number]:
                return [earlier(self.campaign, self.whole, int(number) - 1)[0]]
            case ["own", "milestone", number]:
                runs = experts_of(self.campaign.config.partition.k)
                return [earlier(self.campaign, run, int(number) - 1)[0] for run in runs]
        return []

    @property
    def case(self) -> str:
        """For tables."""
        apart = self.name == "ensemble" and not self.campaign.config.budget.pretrain
        return f"{self.name}, nothing shared" if apart else self.name

    @property
    def whole(self) -> Run:
        """The run of a network on all the data: the monolith's, or shared pretraining's."""
        if self.name == "ensemble" and not self.campaign.config.budget.pretrain:
            raise LookupError(f"{self.folder.name} shares no pretraining")
        return Run("pretrain" if self.name == "ensemble" else "monolith")

    def _average(self) -> Expert:
        if not self.campaign.config.budget.pretrain:
            raise LookupError(f"experts of {self.folder.name} have no common start")
        ensemble = self.candidate.model.bank
        every = (ensemble.experts[number] for number in range(len(ensemble.experts)))
        return mean([expert for expert in every if isinstance(expert, Expert)])

    def averaged(self, last: int) -> Candidate:
        """The model, of whose every network the last milestones are averaged."""
        if last == 1:
            return self.candidate
        runs = experts_of(self.campaign.config.partition.k) if self.name == "ensemble" else [self.whole]
        means = [mean([earlier(self.campaign, run, -n)[0] for n in range(1, last + 1)]) for run in runs]
        now = self.candidate.model.bank
        new = Bank(means, now.router, pretrain=now.pretrain)
        return replace(self.candidate, model=Model(new, self.candidate.model.card))

    def measured(self, way: Way) -> dict[str, float]:
        """Metrics of a way."""
        generation = generation_of(self.campaign).with_(
            routing=way.routing, guidance=max(2.0, way.caption), steps=way.steps, shift=way.shift, seed=0
        )
        candidate, others = self.averaged(way.averaged), self.others(way.null)
        source = Guided(candidate, generation, self.conditions, way=way, others=others)
        point = self.judge.measure(source)
        assert point is not None
        return {name: value["value"] for name, value in point.values.items()}


def mean(experts: Sequence[Expert]) -> Expert:
    """One network of the experts' averaged weights."""
    average = AveragedModel(experts[0].network)
    for expert in experts:
        average.update_parameters(expert.network)
    return replace(experts[0], network=average.module)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--campaign", type=Path, help="whose ensemble is measured")
    parser.add_argument("--single", type=Path, help="whose monolith is measured")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="ways whose names hold one of these texts")
    parser.add_argument("--split", default="heldout", choices=["heldout", "test"])
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--quick", action="store_true", help="one tiny campaign of its own")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            made = tiny(Path(folder), 0, "train.milestones=8")
            options.campaign = options.single = made
            options.samples = 40
            measure(options, 2)
    elif options.campaign or options.single:
        measure(options)
    else:
        parser.error("give --campaign, --single or both, or --quick")


def measure(options: argparse.Namespace, steps: int | None = None) -> None:
    """All ways of both models."""
    rows: list[dict[str, Any]] = []
    kinds = [("ensemble", options.campaign, ENSEMBLE), ("monolith", options.single, SINGLE)]
    for name, folder, ways in kinds:
        if folder is None:
            continue
        bench = Bench(folder, name, options.samples, options.split)
        for way in ways:
            if options.only and not any(text in f"{name}: {way.name}" for text in options.only):
                continue
            if steps:
                way = replace(way, steps=steps)
            try:
                values = bench.measured(way)
            except LookupError as error:
                print(f"left out: {way.name}: {error}")
                continue
            rows += [row(f"{bench.case}: {way.name}", metric, value) for metric, value in values.items()]
            print(f"{name}: {way.name}: {values}", flush=True)
    finish("levers", rows, options.json, {"split": options.split, "samples": options.samples})


if __name__ == "__main__":
    with using_threads(1):
        main()
