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
from atoll.campaign.initial import pretrain_finished
from atoll.campaign.measured import BASE, ComparedModel, CurveRow, How, ReachRow
from atoll.campaign.milestones import Milestone, TrainingRun
from atoll.campaign.runs import Run
from atoll.measure.models import WIDE, Candidate
from atoll.measure.setup import CommonSetup
from atoll.model.bank import Bank
from atoll.model.checkpoint import Checkpoint
from atoll.model.dispatch import Costs
from atoll.model.folder import PRETRAIN_PART
from atoll.model.model import ENSEMBLE, Model


@dataclass(frozen=True)
class CurvePoint:
    """A model after a share of its own training; of an ensemble, of its experts'."""

    share: float
    train_flops: float
    weights: Mapping[str, str]
    """What they are known by; empty for what was published, like the milestones."""
    chosen: Mapping[str, Milestone | None]


class TrainingCurve:
    """The way of a campaign's training, as far as its checkpoints tell.

    Raises:
        ConfigError: the experts have kept no milestones that they share.
    """

    def __init__(self, setup: CommonSetup) -> None:
        self.setup, self.store, content = setup, setup.campaign.store, setup.content
        self.experts = {
            n: TrainingRun.of(self.store, f"ensemble/experts/{n}", f"{Run('expert', n).folder}/run")
            for n in content.experts
        }
        # An expert without steps of its own has the same weights at every share.
        self.trained = {n: run for n, run in self.experts.items() if run.steps}
        names = ["pretrain"] if pretrain_finished(setup.campaign) else []
        names += [name for name in setup.dense if name == "monolith"]
        self.single = {name: TrainingRun.of(self.store, f"{name}/expert", f"{name}/run") for name in names}
        self.guide = {PRETRAIN_PART: content.parts[PRETRAIN_PART]} if PRETRAIN_PART in content.parts else {}
        without = [n for n, run in self.trained.items() if not run.shares]
        if without or not self.trained:
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
        pretrain = self.single["pretrain"].card.train_flops if "pretrain" in self.single else 0.0
        first, points = min(self.trained.values(), key=lambda run: len(run.shares)), list[CurvePoint]()
        ways: list[tuple[float, dict[str, Milestone | None]]] = [
            (share, {f"experts/{n}": run.at(share, first.steps) for n, run in self.experts.items()})
            for share in first.shares
        ]
        ways = [(s, chosen) for s, chosen in ways if all(chosen[f"experts/{n}"] for n in self.trained)]
        for share, chosen in [*ways, (1.0, dict[str, Milestone | None]())]:
            spent = self.setup.router.train_flops + pretrain
            weights = {"router": self.setup.router.weights_sha256, **self.guide} if chosen else {}
            for n, run in self.experts.items():
                milestone = chosen.get(f"experts/{n}")
                spent += run.card.train_flops * (milestone.step / run.steps if milestone else 1.0)
                if chosen:
                    weights[f"experts/{n}"] = milestone.sha256 if milestone else run.card.weights_sha256
            points.append(CurvePoint(share, spent, weights, chosen))
        return points

    def dense(self, name: str) -> list[CurvePoint]:
        """Monolith or pretraining at its own milestones, and at the end."""
        run = self.single[name]
        points = [
            CurvePoint(share, run.card.train_flops * share, {name: milestone.sha256}, {name: milestone})
            for share, milestone in zip(run.shares, run.milestones, strict=False)  # the last may be the end
        ]
        return [*points, CurvePoint(1.0, run.card.train_flops, {}, {})]

    def candidate(self, point: CurvePoint, name: str) -> Candidate:
        """A model at a stage, by its name or a strategy's; its weights are loaded when it first draws."""
        setup, chosen = self.setup, point.chosen
        if not chosen:
            return setup.model(name)
        if name in self.single:
            run = self.single[name]
            model = Model(lambda: Bank([run.load(chosen[name], setup.device)]), run.card, setup.device)
            return Candidate(name, point.weights, model)
        # An ensemble of checkpoints is loaded whole: where that may not fit, it stays in host memory.
        limited = setup.campaign.config.sampling.residency.limited
        device, k = torch.device("cpu") if limited else setup.device, setup.content.k

        def assembled() -> Bank:
            loaded = {n: run.load(chosen[f"experts/{n}"], device) for n, run in self.experts.items()}
            guide = Checkpoint(self.store, f"ensemble/{PRETRAIN_PART}").expert(device) if self.guide else None
            cards = {n: run.card for n, run in self.experts.items()}
            costs = Costs.of(setup.router, cards, k, guide.card if guide else None)
            router = Checkpoint(self.store, "ensemble/router").router(device)
            return Bank([loaded.get(n) for n in range(k)], router, (), costs, guide)

        missing = sorted(set(range(k)) - set(self.experts))
        return Candidate(ENSEMBLE, point.weights, Model(assembled, setup.router, device), missing)


def training_curve(setup: CommonSetup, curve: TrainingCurve, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Every model after every part of its training, and when each is as good as the finished monolith; asked
    for are `strategies` of the ensemble, and `samples` of each point."""
    strategies, samples = asked["strategies"], asked["samples"]
    say(f"compare: on the way of the training, {samples:,} pictures each")
    base = curve.single[BASE].card.train_flops if BASE in curve.single else None
    points = [(point, [name]) for name in curve.single for point in curve.dense(name)]
    points += [(point, list(strategies)) for point in curve.ensemble()]
    rows = []
    for point, names in points:
        candidate = curve.candidate(point, names[0])  # for all strategies: it is loaded once
        for name in names:
            row, _, new = setup.row(name, candidate, samples=samples)
            show_point(row, f"{point.share:6.1%} trained", new)
            rows.append(
                CurveRow(
                    model=name,
                    share=point.share,
                    train_flops=point.train_flops,
                    of_monolith=ratio_of(point.train_flops, base),
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
    """When each model reaches the monolith's final distance; nothing without a monolith. The points of
    `start`, a model that the others begin with (shared pretraining), come before theirs."""
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
