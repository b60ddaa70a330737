"""A training curve: how good ensemble, monolith and pretraining were after each part of their training.

At share s the ensemble is made of every expert's averaged weights after s of its own steps, and of the
router as it was published. Its training FLOPs are s of the experts', all of the router's, and all of the
pretraining's, since no expert exists before it is finished. Until then the pretrained network is what
there is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.base.table import ratio_of
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import pretrain_finished
from atoll.campaign.measured import BASE, ComparedModel, CurveRow, How, ReachRow
from atoll.campaign.milestones import Milestone, TrainingRun
from atoll.campaign.runs import Run
from atoll.measure.models import Candidate
from atoll.measure.override import WIDE
from atoll.measure.setup import CommonSetup
from atoll.model.bank import Bank
from atoll.model.card import Card
from atoll.model.checkpoint import Checkpoint
from atoll.model.folder import PRETRAIN_PART, Manifest
from atoll.model.model import ENSEMBLE, Model
from atoll.model.trace import Costs


@dataclass(frozen=True)
class CurvePoint:
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


class TrainingCurve:
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
            n: TrainingRun.of(store, f"ensemble/experts/{n}", f"{Run('expert', n).folder}/run")
            for n in content.experts
        }
        names = [
            *(["pretrain"] if pretrain_finished(campaign) else []),
            *(n for n in dense if n == "monolith"),
        ]
        self.single = {name: TrainingRun.of(store, f"{name}/expert", f"{name}/run") for name in names}
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

    def ensemble(self) -> list[CurvePoint]:
        """The ensemble at every share that all its trained experts have kept, and at the end."""
        trained = {n: one for n, one in self.experts.items() if one.steps}
        first = min(trained.values(), key=lambda one: len(one.shares))
        checkpoints = []
        for share in first.shares:
            chosen = {
                f"experts/{n}": one.at(share, first.steps) if one.steps else None
                for n, one in self.experts.items()
            }
            if all(chosen[f"experts/{n}"] for n in trained):
                checkpoints.append(self._checkpoint(share, chosen))
        return [*checkpoints, self._checkpoint(1.0, {})]

    def _checkpoint(self, share: float, chosen: Mapping[str, Milestone | None]) -> CurvePoint:
        spent = self.router.train_flops + (
            self.single["pretrain"].card.train_flops if "pretrain" in self.single else 0.0
        )
        weights = {"router": self.router.weights_sha256, **self.guide} if chosen else {}
        for n, one in self.experts.items():
            milestone = chosen.get(f"experts/{n}")
            spent += one.card.train_flops * (milestone.step / one.steps if milestone else 1.0)
            if chosen:
                weights[f"experts/{n}"] = milestone.sha256 if milestone else one.card.weights_sha256
        return CurvePoint(share, spent, weights, chosen)

    def dense(self, name: str) -> list[CurvePoint]:
        """Monolith or pretraining at its own milestones, and at the end."""
        origin = self.single[name]
        checkpoints = [
            CurvePoint(share, origin.card.train_flops * share, {name: one.sha256}, {name: one})
            for share, one in zip(origin.shares, origin.milestones, strict=False)  # the last may be the end
        ]
        return [*checkpoints, CurvePoint(1.0, origin.card.train_flops, {}, {})]

    def candidate(self, setup: CommonSetup, checkpoint: CurvePoint, name: str) -> Candidate:
        """A model at a stage, by its name or a strategy's; its weights are loaded when it first draws."""
        if not checkpoint.chosen:
            return setup.model(name)
        if name in self.single:
            origin, chosen = self.single[name], checkpoint.chosen[name]
            model = Model(lambda: Bank([origin.load(chosen, setup.device)]), origin.card, setup.device)
            return Candidate(name, checkpoint.weights, model)
        # An ensemble of checkpoints is loaded whole: where that may not fit, it stays in host memory.
        limited = setup.campaign.config.sampling.residency.limited
        device = torch.device("cpu") if limited else setup.device
        missing = sorted(set(range(self.k)) - set(self.experts))
        model = Model(lambda: self._assembled(checkpoint, device), self.router, device)
        return Candidate(ENSEMBLE, checkpoint.weights, model, missing)

    def _assembled(self, checkpoint: CurvePoint, device: torch.device) -> Bank:
        loaded = {n: one.load(checkpoint.chosen[f"experts/{n}"], device) for n, one in self.experts.items()}
        pretrain = Checkpoint(self.store, f"ensemble/{PRETRAIN_PART}").expert(device) if self.guide else None
        cards = {n: one.card for n, one in self.experts.items()}
        costs = Costs.of(self.router, cards, self.k, pretrain.card if pretrain else None)
        router = Checkpoint(self.store, "ensemble/router").router(device)
        return Bank([loaded.get(n) for n in range(self.k)], router, (), costs, pretrain)


def training_curve(setup: CommonSetup, curve: TrainingCurve, request: Mapping[str, Any]) -> dict[str, Any]:
    """Every model after every part of its training, and when each is as good as the finished monolith.

    Args:
        setup: of the comparison.
        curve: of the campaign's training.
        request: `strategies` of the ensemble, and `samples` of each point.
    """
    strategies, samples = request["strategies"], request["samples"]
    say(f"compare: on the way of the training, {samples:,} pictures each")
    base = curve.single[BASE].card.train_flops if BASE in curve.single else None
    points = [(checkpoint, [name]) for name in curve.single for checkpoint in curve.dense(name)]
    points += [(checkpoint, list(strategies)) for checkpoint in curve.ensemble()]
    rows = []
    for checkpoint, names in points:
        candidate = curve.candidate(setup, checkpoint, names[0])  # for all strategies: it is loaded once
        for name in names:
            row, _, new = setup.row(name, candidate, samples=samples)
            show_point(row, f"{checkpoint.share:6.1%} trained", new)
            rows.append(
                CurveRow(
                    model=name,
                    share=checkpoint.share,
                    train_flops=checkpoint.train_flops,
                    of_monolith=ratio_of(checkpoint.train_flops, base),
                    **row.model_dump(include={"distance", "precision", "recall"}),
                )
            )
    order = [*curve.single, *strategies]
    rows.sort(key=lambda row: order.index(row.model))
    reach = reach_table(rows, "pretrain" if "pretrain" in curve.single else None)
    for reached in reach:
        least = "at most " if reached.how == "at the first point" else ""
        say(
            f"  {reached.model:<{WIDE}} does not reach the monolith's final distance"
            if reached.of_monolith is None
            else f"  {reached.model:<{WIDE}} as good as the finished monolith after {least}"
            f"{reached.of_monolith:.1%} of its FLOPs"
        )
    return {"curve": tuple(rows), "reach": tuple(reach)}


def show_point(row: ComparedModel, where: str, new: bool) -> None:
    """Print a point of a sweep or a curve."""
    spent = f"{row.seconds:.0f} s" if new else "known"
    say(f"  {row.name:<{WIDE}} {where}   distance {row.distance:8.3f}   {spent}")


def crossing(path: Sequence[tuple[float, float]], target: float) -> tuple[float | None, How]:
    """Training FLOPs at which a path of (FLOPs, distance) first comes down to a target, by linear
    interpolation, and how that is known; see `ReachRow`."""
    for number, (flops, distance) in enumerate(path):
        if distance > target:
            continue
        if number == 0:
            return flops, "at the first point"
        before, above = path[number - 1]
        return before + (flops - before) * (above - target) / (above - distance), "between points"
    return None, "never"


def reach_table(rows: Sequence[CurveRow], start: str | None = None) -> list[ReachRow]:
    """When each model reaches the monolith's final distance; nothing without a monolith.

    Args:
        rows: of the curve.
        start: a model that the others begin with (shared pretraining): its points come before theirs.
    """
    paths: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        assert row.distance is not None
        paths.setdefault(row.model, []).append((row.train_flops, row.distance))
    if BASE not in paths:
        return []
    whole, target = paths[BASE][-1]
    reach = []
    for name, path in paths.items():
        if name == start:
            continue
        # No expert exists before pretraining is finished: until then the pretrained network is what there is.
        before = paths.get(start, []) if start and name != BASE else []
        flops, how = crossing([*before, *path], target)
        part = ratio_of(flops, whole)
        reach.append(ReachRow(model=name, target=target, train_flops=flops, of_monolith=part, how=how))
    return reach
