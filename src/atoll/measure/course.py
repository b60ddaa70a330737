"""A campaign on its way: what ensemble, monolith and seed were after a part of their training.

At share s the ensemble is made of every expert's averaged weights after s of its own steps, and of the
router as it was published. Its training FLOPs are s of the experts', all of the router's, and all of the
pretraining's, since no expert exists before it is finished. Until then the pretrained network is what
there is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from atoll.base.errors import ConfigError, StoreError
from atoll.campaign.folder import Campaign
from atoll.campaign.milestones import Milestone, averaged, milestones
from atoll.campaign.pretrain import pretrain_finished
from atoll.ensemble.card import Card
from atoll.ensemble.ensemble import Costs, Ensemble
from atoll.ensemble.expert import Expert, RouterModel, filled, read_card, read_part
from atoll.ensemble.folder import Manifest
from atoll.measure.bench import Bench, Subject
from atoll.networks.families import family
from atoll.store.store import Store


@dataclass(frozen=True)
class Origin:
    """A part of a campaign and its milestones.

    Attributes:
        store: the campaign.
        part: folder of the published network.
        run: folder of the run that made it.
        card: of the published network.
        milestones: by rising step.
    """

    store: Store
    part: str
    run: str
    card: Card
    milestones: tuple[Milestone, ...]

    @classmethod
    def of(cls, store: Store, part: str, run: str) -> "Origin":
        """Look at a part's log."""
        found = tuple(milestones(store.sub(run), store.sub(part)))
        return cls(store, part, run, read_card(store, part), found)

    @property
    def steps(self) -> int:
        """Of the whole run; 0 for an adopted expert, which was never trained here."""
        return self.card.samples // self.card.batch if self.card.batch else 0

    @property
    def shares(self) -> list[float]:
        """Part of the run that each milestone before its end comes after."""
        return [one.step / self.steps for one in self.milestones if one.step < self.steps]

    def at(self, share: float, steps: int) -> Milestone | None:
        """The milestone at a share of another run of so many steps, up to rounding; None without one."""
        near = min(self.milestones, key=lambda one: abs(one.step / self.steps - share), default=None)
        rounding = max(1 / self.steps, 1 / steps) + 1e-9
        return near if near and abs(near.step / self.steps - share) <= rounding else None

    def load(self, milestone: Milestone | None, device: torch.device | str = "cpu") -> Expert:
        """The network with a milestone's averaged weights, or as it was published, on the device.

        Raises:
            StoreError: a file is damaged, or the checkpoint is another network's.
        """
        if milestone is None:
            found = Expert.load(self.store, self.part)
            found.network.to(device)
            return found
        card, config, weights = read_part(self.store, self.part)
        average = averaged(self.store.sub(self.run), milestone)
        own = {name: tuple(value.shape) for name, value in weights.items()}
        if any(own.get(name) != tuple(value.shape) for name, value in average.items()):
            where = self.store.name(f"{self.run}/{milestone.folder}")
            raise StoreError(f"{where} is of another network than {self.part}", "leave out compare.curve")
        network = filled(family(card.family).load(config), {**weights, **average}).to(device)
        return Expert(network, card.family, card.prediction, card.schedule, card)


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
            n: Origin.of(store, f"ensemble/experts/{n}", f"islands/{n}/run") for n in content.experts
        }
        names = [
            *(["pretrain"] if pretrain_finished(campaign) else []),
            *(n for n in dense if n == "monolith"),
        ]
        self.single = {name: Origin.of(store, f"{name}/expert", f"{name}/run") for name in names}
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
        spent = self.router.train_flops + (self.single["pretrain"].card.train_flops if self.seeded else 0.0)
        weights = {"router": self.router.weights_sha256} if chosen else {}
        for n, one in self.experts.items():
            milestone = chosen.get(f"experts/{n}")
            spent += one.card.train_flops * (milestone.step / one.steps if milestone else 1.0)
            if chosen:
                weights[f"experts/{n}"] = milestone.sha256 if milestone else one.card.weights_sha256
        return Stage(share, spent, weights, chosen)

    @property
    def seeded(self) -> bool:
        """Whether the experts start from shared pretraining."""
        return "pretrain" in self.single

    def dense(self, name: str) -> list[Stage]:
        """Monolith or seed at its own milestones, and at the end."""
        origin = self.single[name]
        stages = [
            Stage(share, origin.card.train_flops * share, {name: one.sha256}, {name: one})
            for share, one in zip(origin.shares, origin.milestones, strict=False)  # the last may be the end
        ]
        return [*stages, Stage(1.0, origin.card.train_flops, {}, {})]

    def subjects(self, bench: Bench, stage: Stage) -> Callable[[str], Subject]:
        """What is drawn from at a stage, by the name of a single network or of a strategy of the ensemble.

        What is loaded is loaded once, and let go with the function.
        """
        # An ensemble of checkpoints is loaded whole: where that may not fit, it stays in host memory.
        limited = bench.campaign.config.sampling.residency.limited
        device = torch.device("cpu") if limited else bench.device
        load = cache(lambda: self._assembled(stage, device))

        def named(name: str) -> Subject:
            if not stage.chosen:
                return bench.published(name)
            if name in self.single:
                origin, chosen = self.single[name], stage.chosen[name]
                return Subject(
                    name, stage.weights, lambda: origin.load(chosen, bench.device), True, bench.device
                )
            return Subject(name, stage.weights, load, False, device)

        return named

    def _assembled(self, stage: Stage, device: torch.device) -> Ensemble:
        loaded = {n: one.load(stage.chosen[f"experts/{n}"], device) for n, one in self.experts.items()}
        costs = Costs.of(self.router, {n: one.card for n, one in self.experts.items()}, self.k)
        router = RouterModel.load(self.store, "ensemble/router")
        router.network.to(device)
        return Ensemble([loaded.get(n) for n in range(self.k)], router, (), costs)
