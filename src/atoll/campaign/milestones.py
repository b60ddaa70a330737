"""What a run was on its way: the checkpoints that `train.milestones` kept, and their averaged weights."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atoll.base.hashing import sha256
from atoll.model.card import Card
from atoll.model.checkpoint import CARD, Checkpoint
from atoll.store.log import COMMIT, Commit, Entry, Log
from atoll.store.manifest import read_file
from atoll.store.store import Damaged, Store

if TYPE_CHECKING:  # what there is, is seen without torch
    from torch import Tensor

    from atoll.model.expert import StoredExpert


@dataclass(frozen=True)
class TrainingRun:
    """A published network (`part`), the folder of the run that made it, and its log's milestones by step."""

    store: Store
    part: str
    run: str
    card: Card
    milestones: tuple[Entry, ...]

    @classmethod
    def of(cls, store: Store, part: str, run: str) -> "TrainingRun":
        """Look at a part's log; a log that published another network counts for nothing."""
        log, kept = Log(store.sub(run), ""), dict[int, Entry]()
        published, card = log.publication(), sha256(store.get(f"{part}/{CARD}"))
        if published is not None and any((f.path, f.sha256) == (CARD, card) for f in published.files):
            kept = {entry.step: entry for entry in log.commits() if entry.milestone}
        # Where only `expert/` was carried here, the log names checkpoints that stayed behind.
        found = (kept[step] for step in sorted(kept))
        there = tuple(entry for entry in found if store.exists(f"{run}/{entry.checkpoint}/{COMMIT}"))
        return cls(store, part, run, Checkpoint(store, part).card, there)

    @property
    def steps(self) -> int:
        """Of the whole run; 0 for an adopted expert, which was never trained here."""
        return self.card.samples // self.card.batch if self.card.batch else 0

    @property
    def shares(self) -> list[float]:
        """Part of the run that each milestone before its end comes after."""
        return [milestone.step / self.steps for milestone in self.milestones if milestone.step < self.steps]

    def at(self, share: float, steps: int) -> Entry | None:
        """The milestone at a share of another run of so many steps, up to rounding; None without one."""
        if not (self.milestones and self.steps):
            return None
        near = min(self.milestones, key=lambda milestone: abs(milestone.step / self.steps - share))
        return near if abs(near.step / self.steps - share) <= max(1 / self.steps, 1 / steps) + 1e-9 else None

    def card_at(self, milestone: Entry) -> Card:
        """The card of the network as it was at a milestone, but for the digest of its weights."""
        card, share = self.card, milestone.step / self.steps
        changes = {"samples": milestone.step * card.batch, "train_flops": card.train_flops * share}
        provenance = {**card.provenance, "milestone": milestone.step}
        return card.model_copy(update={**changes, "weights_sha256": "", "provenance": provenance})

    def stored(self, milestone: Entry | None) -> "StoredExpert":
        """The network with a milestone's averaged weights, or as it was published."""
        from safetensors.torch import load as load_tensors

        stored = Checkpoint(self.store, self.part).open_lazily()
        if milestone is None:
            return stored
        # Of the checkpoint only the average is read: optimizer and raw weights are three times as much.
        run, name = self.store.sub(self.run), f"{milestone.checkpoint}/{COMMIT}"
        if sha256(run.get(name)) != milestone.sha256:
            fix = "restore it, leave out compare.curve, or set sampling.guide_share=1"
            raise Damaged(f"{run.name(name)} is not what the log says", fix)
        average: dict[str, Tensor] = {}
        for entry in Commit.read(run, name).files:
            if entry.path.startswith("ema"):
                average |= load_tensors(read_file(run, milestone.checkpoint, entry))
        # Buffers are not averaged.
        own = {name: average[name] if name in average else stored.weights[name] for name in stored.specs}
        return replace(stored, weights=own)
