"""A training curve: how good ensemble, monolith and pretraining were after each part of their training.

At share s the ensemble is made of every expert's averaged weights after s of its own steps, and of the
router as it was published. Its training FLOPs are s of the experts', all of the router's, and all of the
pretraining's, since no expert exists before it is finished. Until then the pretrained network is what
there is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import pretrain_finished
from atoll.campaign.milestones import Milestone, Origin
from atoll.campaign.results import Record, Table
from atoll.campaign.runs import Run
from atoll.measure.comparison import BASE, Bench
from atoll.measure.departure import WIDE
from atoll.measure.guidance_sweep import MEASURED, tell
from atoll.measure.models import Candidate
from atoll.measure.table import Cell, number, ratio_of
from atoll.model.bank import Bank
from atoll.model.card import Card
from atoll.model.checkpoint import Checkpoint
from atoll.model.folder import PRETRAIN_PART, Manifest
from atoll.model.model import ENSEMBLE, Model
from atoll.model.trace import Costs

CURVE = ("model", "share", "train_flops", "of_monolith", *MEASURED)
REACH = ("model", "target", "train_flops", "of_monolith", "how")
How = Literal["between points", "at the first point", "never"]


@dataclass(frozen=True)
class Stage:
    """A model after a part of its training.

    Attributes:
        share: of its own training; of an ensemble, of its experts'.
        train_flops: operations spent by then.
        weights: what the weights are known by; empty for what was published.
        chosen: the milestone of each part.
    """

    share: float
    train_flops: float
    weights: Mapping[str, str]
    chosen: Mapping[str, Milestone | None]


class Course:
    """The way of a campaign's training, as far as its checkpoints tell.

    Args:
        campaign: with an ensemble.
        content: of `ensemble.json`.
        router: the router's card.
        dense: names of the single networks that are published.

    Raises:
        ConfigError: the experts have kept no milestones that they share.
    """

    def __init__(self, campaign: Campaign, content: Manifest, router: Card, dense: Sequence[str]) -> None:
        store = campaign.store
        self.store, self.router, self.k = store, router, content.k
        self.experts = {
            n: Origin.of(store, f"ensemble/experts/{n}", f"{Run('expert', n).folder}/run")
            for n in content.experts
        }
        names = [
            *(["pretrain"] if pretrain_finished(campaign) else []),
            *(n for n in dense if n == "monolith"),
        ]
        self.single = {name: Origin.of(store, f"{name}/expert", f"{name}/run") for name in names}
        self.guide = {PRETRAIN_PART: content.parts[PRETRAIN_PART]} if PRETRAIN_PART in content.parts else {}
        self._check()

    def _check(self) -> None:
        trained = {n: one for n, one in self.experts.items() if one.steps}
        without = [n for n, one in trained.items() if not one.shares]
        if without or not trained:
            who = ", ".join(map(str, without or self.experts))
            raise ConfigError(
                f"compare.curve: no checkpoints on the way were kept by the experts {who}",
                "set train.milestones (2 or more) before they are trained, or leave out compare.curve",
            )
        if not self.ensemble()[:-1]:
            raise ConfigError(
                "compare.curve: the experts kept checkpoints at different parts of their training",
                "give all islands the same train.milestones, or leave out compare.curve",
            )

    def ensemble(self) -> list[Stage]:
        """The ensemble at every share that all its trained experts have kept, and at the end."""
        trained = {n: one for n, one in self.experts.items() if one.steps}
        first = min(trained.values(), key=lambda one: len(one.shares))
        stages = []
        for share in first.shares:
            chosen = {
                f"experts/{n}": one.at(share, first.steps) if one.steps else None
                for n, one in self.experts.items()
            }
            if all(chosen[f"experts/{n}"] for n in trained):
                stages.append(self._stage(share, chosen))
        return [*stages, self._stage(1.0, {})]

    def _stage(self, share: float, chosen: Mapping[str, Milestone | None]) -> Stage:
        spent = self.router.train_flops + (
            self.single["pretrain"].card.train_flops if "pretrain" in self.single else 0.0
        )
        weights = {"router": self.router.weights_sha256, **self.guide} if chosen else {}
        for n, one in self.experts.items():
            milestone = chosen.get(f"experts/{n}")
            spent += one.card.train_flops * (milestone.step / one.steps if milestone else 1.0)
            if chosen:
                weights[f"experts/{n}"] = milestone.sha256 if milestone else one.card.weights_sha256
        return Stage(share, spent, weights, chosen)

    def dense(self, name: str) -> list[Stage]:
        """Monolith or pretraining at its own milestones, and at the end."""
        origin = self.single[name]
        stages = [
            Stage(share, origin.card.train_flops * share, {name: one.sha256}, {name: one})
            for share, one in zip(origin.shares, origin.milestones, strict=False)  # the last may be the end
        ]
        return [*stages, Stage(1.0, origin.card.train_flops, {}, {})]

    def candidate(self, bench: Bench, stage: Stage, name: str) -> Candidate:
        """A model at a stage, by its name or a strategy's; its weights are loaded when it first draws."""
        if not stage.chosen:
            return bench.model(name)
        if name in self.single:
            origin, chosen = self.single[name], stage.chosen[name]
            model = Model(lambda: Bank([origin.load(chosen, bench.device)]), origin.card, bench.device)
            return Candidate(name, stage.weights, model)
        # An ensemble of checkpoints is loaded whole: where that may not fit, it stays in host memory.
        limited = bench.campaign.config.sampling.residency.limited
        device = torch.device("cpu") if limited else bench.device
        missing = sorted(set(range(self.k)) - set(self.experts))
        model = Model(lambda: self._assembled(stage, device), self.router, device)
        return Candidate(ENSEMBLE, stage.weights, model, missing)

    def _assembled(self, stage: Stage, device: torch.device) -> Bank:
        loaded = {n: one.load(stage.chosen[f"experts/{n}"], device) for n, one in self.experts.items()}
        pretrain = Checkpoint(self.store, f"ensemble/{PRETRAIN_PART}").expert(device) if self.guide else None
        cards = {n: one.card for n, one in self.experts.items()}
        costs = Costs.of(self.router, cards, self.k, pretrain.card if pretrain else None)
        router = Checkpoint(self.store, "ensemble/router").router(device)
        return Bank([loaded.get(n) for n in range(self.k)], router, (), costs, pretrain)


def training_curve(bench: Bench, course: Course, request: dict[str, Any]) -> dict[str, Table]:
    """Tables `curve`, every model after every part of its training, and `reach`.

    Args:
        bench: of the comparison.
        course: of the campaign's training.
        request: `strategies` of the ensemble, and `samples` of each point.
    """
    strategies, samples = request["strategies"], request["samples"]
    say(f"compare: on the way of the training, {samples:,} pictures each")
    base = course.single[BASE].card.train_flops if BASE in course.single else None
    ways = [(stage, [name]) for name in course.single for stage in course.dense(name)]
    ways += [(stage, list(strategies)) for stage in course.ensemble()]
    lines: list[list[Cell]] = []
    for stage, names in ways:
        candidate = course.candidate(bench, stage, names[0])  # one for all strategies: it is loaded once
        for name in names:
            row, new = bench.row(candidate, name, None, samples)
            tell(name, f"{stage.share:6.1%} trained", row, new)
            cost = [stage.share, stage.train_flops, ratio_of(stage.train_flops, base)]
            lines.append([name, *cost, *(getattr(row, key) for key in MEASURED)])
    order = [*course.single, *strategies]
    table = Table.of(CURVE, sorted(lines, key=lambda line: order.index(str(line[0]))))
    reach = reach_table(table.records, "pretrain" if "pretrain" in course.single else None)
    for record in reach.records:
        least = "at most " if record["how"] == "at the first point" else ""
        say(
            f"  {record['model']:<{WIDE}} does not reach the monolith's final distance"
            if record["of_monolith"] is None
            else f"  {record['model']:<{WIDE}} as good as the finished monolith after {least}"
            f"{record['of_monolith']:.1%} of its FLOPs"
        )
    return {"curve": table, "reach": reach}


@dataclass(frozen=True)
class Reached:
    """When a model is as good as the target.

    Attributes:
        train_flops: operations spent by then; None if it never was.
        how: `between points` is interpolated; `at the first point` it was as good already, and may have been
            before.
    """

    train_flops: float | None
    how: How


def reached(path: Sequence[tuple[float, float]], target: float) -> Reached:
    """Where a path first comes down to a target, by linear interpolation.

    Args:
        path: training FLOPs, rising, and distances.
        target: distance to be reached.
    """
    for place, (flops, distance) in enumerate(path):
        if distance > target:
            continue
        if place == 0:
            return Reached(flops, "at the first point")
        before, above = path[place - 1]
        return Reached(before + (flops - before) * (above - target) / (above - distance), "between points")
    return Reached(None, "never")


def reach_table(rows: Sequence[Record], start: str | None = None) -> Table:
    """When each model reaches the monolith's final distance.

    Args:
        rows: of the table `curve`.
        start: a model that the others begin with (shared pretraining): its points come before theirs.

    Returns:
        Per model the `target`, the training FLOPs of its `Reached`, and these over the monolith's. The
        monolith's own row is what the others are read against: it comes before its end where the monolith no
        longer improves, or by the noise of the distances.
    """
    paths = {
        name: [row for row in rows if row["model"] == name]
        for name in dict.fromkeys(row["model"] for row in rows)
    }
    final = paths.get(BASE, [])[-1:]
    lines: list[list[Cell]] = []
    for name, rows_of in paths.items() if final else ():
        if name == start:
            continue
        target, whole = number(final[0]["distance"]), final[0]["train_flops"]
        points = [*(paths.get(start, []) if start and name != BASE else []), *rows_of]
        path = [(number(row["train_flops"]), number(row["distance"])) for row in points]
        first = reached(path, target)
        lines.append([name, target, first.train_flops, ratio_of(first.train_flops, whole), first.how])
    return Table.of(REACH, lines)
