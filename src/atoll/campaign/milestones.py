"""What a run was on its way: the checkpoints that `train.milestones` kept, and their averaged weights."""

from dataclasses import dataclass

import torch
from safetensors.torch import load as load_tensors
from torch import Tensor

from atoll.base.errors import StoreError
from atoll.base.hashing import sha256
from atoll.campaign.publication import CARD
from atoll.model.card import Card
from atoll.model.checkpoint import Checkpoint
from atoll.model.expert import Expert
from atoll.model.stored import build_network, fill_network
from atoll.networks.families import family
from atoll.store.log import COMMIT, Commit, Log
from atoll.store.manifest import read_file
from atoll.store.store import Damaged, Store

AVERAGE = "ema.safetensors"
WITHOUT = "restore it, leave out compare.curve, or set sampling.guide_share=1"


@dataclass(frozen=True)
class Milestone:
    """A checkpoint that stays for good.

    Attributes:
        step: optimizer steps done.
        folder: of the checkpoint, from the run's folder.
        sha256: of its `COMMIT.json`, as the log says.
    """

    step: int
    folder: str
    sha256: str


def _kept(run: Store, part: Store) -> tuple[Milestone, ...]:
    """Milestones of a run by rising step, as its log has them; none if it published another network."""
    log = Log(run, "")
    published, card = log.publication(), sha256(part.get(CARD))
    if published is None or all((file.path, file.sha256) != (CARD, card) for file in published.files):
        return ()
    kept = {e.step: Milestone(e.step, e.checkpoint, e.sha256) for e in log.commits() if e.milestone}
    return tuple(kept[step] for step in sorted(kept) if run.exists(f"{kept[step].folder}/{COMMIT}"))


def _averaged(run: Store, milestone: Milestone) -> dict[str, Tensor]:
    """The averaged weights of a milestone, verified; the rest of the checkpoint is not read.

    Raises:
        Damaged: the commit or the weights are not what the log and the commit say.
        Absent: one of them is missing.
    """
    name = f"{milestone.folder}/{COMMIT}"
    if sha256(run.get(name)) != milestone.sha256:
        raise Damaged(f"{run.name(name)} is not what the log says", WITHOUT)
    (entry,) = (entry for entry in Commit.read(run, name).files if entry.path == AVERAGE)
    return load_tensors(read_file(run, milestone.folder, entry))


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
        return cls(store, part, run, Checkpoint(store, part).card, _kept(store.sub(run), store.sub(part)))

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
        if not (self.milestones and self.steps):
            return None
        near = min(self.milestones, key=lambda one: abs(one.step / self.steps - share))
        rounding = max(1 / self.steps, 1 / steps) + 1e-9
        return near if abs(near.step / self.steps - share) <= rounding else None

    def load(self, milestone: Milestone | None, device: torch.device | str = "cpu") -> Expert:
        """The network with a milestone's averaged weights, or as it was published, on the device.

        Raises:
            StoreError: a file is damaged, or the checkpoint is another network's.
        """
        if milestone is None:
            return Checkpoint(self.store, self.part).expert(device)
        config, weights = Checkpoint(self.store, self.part).read()
        average = _averaged(self.store.sub(self.run), milestone)
        shapes = {name: tuple(value.shape) for name, value in weights.items()}
        if any(shapes.get(name) != tuple(value.shape) for name, value in average.items()):
            where = self.store.name(f"{self.run}/{milestone.folder}")
            raise StoreError(f"{where} is of another network than {self.part}", WITHOUT)
        network = build_network(family(self.card.family).load, config, weights, self.part)
        fill_network(network, {**weights, **average}).to(device)
        return Expert(network, self.card.family, self.card.prediction, self.card.schedule, self.card)
