"""A scorer: a reader with heads on its state, trained in two stages, kept in a folder of two files.

After HumanAesExpert (Liao et al. 2025, arXiv 2503.23907): a score of the whole, scores along a tree, and a
vote on three of them. Widths, activations and the vote's form are not published; these are ours.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from atoll.base.console import Progress
from atoll.base.errors import ConfigError, DataError
from atoll.base.hashing import digest
from atoll.curate.aesthetics.readers import VLM, reader
from atoll.curate.aesthetics.scale import HEADS, Labels, Scale
from atoll.store.manifest import Published, read_file, write_file
from atoll.store.store import Store
from atoll.store.tensors import read_tensors

BATCH = 64


class ScorerFile(Published):
    """`scorer.json`: what a scorer is, beside its trained weights."""

    FORMAT, PLACE, ERROR = "atoll/scorer", "scorer.json", DataError
    REMEDY = "run 'atoll aesthetics train' again"

    backbone: str
    """Name, as `--backbone` has it."""
    producer: dict[str, Any]
    """What the backbone is: name, hash of its weights, how it sees."""
    scale: Scale
    """Dimensions, levels and words."""
    training: dict[str, int | float | str]
    """Rows, groups and settings of the training."""


class ExpertHead(nn.Module):
    """Scores of every dimension along the scale's tree: connections that are not in it do not exist.

    A leaf sees the reader's state, any other dimension the scores of its parts and nothing else.
    """

    def __init__(self, scale: Scale, width: int) -> None:
        super().__init__()
        self.parts, self.order = scale.parts, scale.upwards
        self.nodes = nn.ModuleList(nn.Linear(len(parts) or width, 1) for parts in scale.parts)
        for parts, node in zip(scale.parts, self.nodes, strict=True):
            if parts:  # at first the mean of the parts
                assert isinstance(node, nn.Linear)
                nn.init.constant_(node.weight, 1 / len(parts))
                nn.init.zeros_(node.bias)

    def forward(self, state: Tensor) -> Tensor:
        """Scores `(B, N)` of states `(B, W)`."""
        scores: dict[int, Tensor] = {}
        for number in self.order:
            parts = self.parts[number]
            below = torch.cat([scores[part] for part in parts], dim=1) if parts else state
            scores[number] = self.nodes[number](below)
        return torch.cat([scores[number] for number in range(len(self.parts))], dim=1)


class MetaVoter(nn.Module):
    """One score of three: those of the language model, the regression head and the expert head's whole.

    At first their mean; a small network learns what to add, on rows that the heads have not seen.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.change = nn.Sequential(nn.Linear(3, width), nn.GELU(), nn.Linear(width, 1))
        self.shares = nn.Parameter(torch.full((3,), 1 / 3))
        last = self.change[2]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)

    def forward(self, scores: Tensor) -> Tensor:
        """Scores `(B,)` of `(B, 3)`."""
        voted: Tensor = scores @ self.shares + self.change(scores)[:, 0]
        return voted


@dataclass(frozen=True)
class Training:
    """How a scorer is trained; by default a feature reader."""

    epochs: int = 60
    batch: int = BATCH
    rate: float = 1e-3
    """Highest learning rate of AdamW, falling as a cosine."""
    regression: float = 10.0
    """Weight of the regression head's loss, beside that of the answers."""
    expert: float = 10.0
    """Weight of the expert head's loss."""
    vote: float = 0.2
    """Share of the groups that only the second stage sees."""
    seed: int = 0


class Scorer(nn.Module):
    """Scores pictures on a scale; for `backbone` see `readers.reader`."""

    def __init__(self, scale: Scale, backbone: str, device: str = "cpu") -> None:
        super().__init__()
        self.scale, self.backbone, self.device = scale, backbone, device
        self.reader = reader(backbone, scale, device)
        width = self.reader.width
        self.heads = nn.ModuleDict({"regression": nn.Linear(width, 1), "expert": ExpertHead(scale, width)})
        self.heads.to(device)
        self.voter = MetaVoter().to(device)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the scores: three of the whole, then all dimensions."""
        return (*HEADS, *self.scale.names)

    def losses(self, seen: Any, scores: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
        """Losses of the answers and of one head, the other being left out.

        Args:
            seen: what the reader's `look` gave of B pictures.
            scores: right ones `(B, N)`, NaN where unknown.
            whole: whether only the whole is scored: the regression head's rows, else the expert head's.
        """
        scores = scores.to(self.device)
        right = scores[:, self.scale.root] if whole else scores
        read = self.reader(seen, whole, self.scale.level(right.cpu()))
        scored = self.heads["regression"](read.state)[:, 0] if whole else self.heads["expert"](read.state)
        known = ~right.isnan()
        return read.loss, mse_loss(scored[known], right[known])

    @torch.inference_mode()
    def scores(self, pictures: Iterable[Image.Image]) -> Tensor:
        """Scores `(B, 3 + N)` of pictures, in the order of `columns`, each in [0, 1]; few lie in memory."""
        parts, rest = [torch.zeros(0, len(self.columns))], iter(pictures)
        while some := [*islice(rest, BATCH)]:
            three, dimensions = self._three(self.reader.look(some))
            scores = torch.cat([three[:, :2], self.voter(three)[:, None], dimensions], dim=1)
            parts.append(scores.clamp(0, 1).cpu())
        return torch.cat(parts)

    def _three(self, seen: Any) -> tuple[Tensor, Tensor]:
        whole, every = self.reader(seen, True), self.reader(seen, False)
        assert whole.levels is not None
        answered = whole.levels.softmax(1) @ self.scale.worth.to(whole.levels.device)
        dimensions = self.heads["expert"](every.state)
        heads = [answered, self.heads["regression"](whole.state)[:, 0], dimensions[:, self.scale.root]]
        return torch.stack(heads, dim=1).clamp(0, 1), dimensions

    def fit(self, labels: Labels, training: Training) -> dict[str, Any]:
        """Train the reader and the heads on some groups, then the voter on the others; how it went."""
        torch.manual_seed(training.seed)
        first, second = split(labels, training.vote, training.seed)
        seen: dict[int, Any] = {}
        progress = Progress("pictures", len(labels), unit="pictures")
        if self.reader.frozen:  # what it reads never changes, so every picture is read once for all epochs
            for rows in np.array_split(np.arange(len(labels)), -(-len(labels) // BATCH)):
                seen |= zip(rows.tolist(), self.reader.look([labels.open(int(r)) for r in rows]), strict=True)
                progress(int(rows[-1]) + 1)
        # The voter learns on pictures that the heads have not seen: on the others the best-fitted head
        # would always look right.
        whole = second[~labels.scores[second, self.scale.root].isnan().numpy()]
        if not len(whole):
            name = self.scale.names[self.scale.root]
            raise DataError(f"no picture to weigh the heads by has a score of {name!r}", "label more of them")
        self._fit_heads(labels, first, seen, training)
        with torch.no_grad():
            parts = [whole[first : first + BATCH].tolist() for first in range(0, len(whole), BATCH)]
            votes = torch.cat([self._three(self._seen(labels, part, seen))[0] for part in parts])
        right = labels.scores[whole, self.scale.root].to(votes.device)
        optimizer = torch.optim.AdamW(self.voter.parameters(), lr=1e-2, weight_decay=0.01)
        for _ in range(300):
            loss = mse_loss(self.voter(votes), right)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {
            **vars(training),
            "rows": len(labels),
            "groups": len(set(labels.groups)),
            "rows with the whole alone": int(labels.whole_only(self.scale.root).sum()),
            # -1 for unknown: NaN is no JSON, and scores lie in [0, 1].
            "labels": digest({"names": labels.names, "scores": labels.scores.nan_to_num(-1).tolist()}),
        }

    def _seen(self, labels: Labels, rows: Sequence[int], seen: dict[int, Any]) -> Any:
        if not self.reader.frozen:
            return self.reader.look([labels.open(row) for row in rows])
        return torch.stack([seen[row] for row in rows])

    def _fit_heads(self, labels: Labels, rows: Any, seen: dict[int, Any], training: Training) -> None:
        trained = [p for part in (self.reader, self.heads) for p in part.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=training.rate, weight_decay=0.01)
        steps = training.epochs * -(-len(rows) // training.batch)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        # Rows of which only the whole is scored train the regression head, all others the expert head.
        alone, random = labels.whole_only(self.scale.root), np.random.default_rng(training.seed)
        progress = Progress("heads", steps, unit="steps")
        self.train()
        for _ in range(training.epochs):
            for batch in np.array_split(random.permutation(rows), -(-len(rows) // training.batch)):
                total = torch.zeros((), device=self.device)
                for whole, weight in ((True, training.regression), (False, training.expert)):
                    part = batch[alone[batch].numpy() == whole]
                    if len(part):
                        seen_of = self._seen(labels, part.tolist(), seen)
                        answers, head = self.losses(seen_of, labels.scores[part], whole)
                        total = total + (answers + weight * head) * (len(part) / len(batch))
                optimizer.zero_grad()
                total.backward()
                nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                schedule.step()
                progress(schedule.last_epoch, note=f"loss {float(total.detach()):.4f}")
        self.eval()

    @property
    def _trained(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu() for name, p in self.named_parameters() if p.requires_grad}

    def save(self, folder: str, training: dict[str, Any]) -> ScorerFile:
        """Write what was trained, then `scorer.json`."""
        store = Store.open(folder, create=True)
        tensors = {name: value.contiguous() for name, value in self._trained.items()}
        file = ScorerFile(
            backbone=self.backbone,
            producer=self.reader.producer(),
            scale=self.scale,
            files=[write_file(store, "", "weights.safetensors", safetensors.torch.save(tensors))],
            training=training,
        )
        store.put_json(ScorerFile.PLACE, file.to_json())
        return file

    @classmethod
    def load(cls, folder: str, device: str = "cpu") -> tuple["Scorer", ScorerFile]:
        """A saved scorer; `AtollError` where there is none, it is damaged or its backbone is another one."""
        store = Store.open(folder)
        if not store.exists(ScorerFile.PLACE):
            raise DataError(f"{folder} holds no scorer (no {ScorerFile.PLACE})", ScorerFile.REMEDY)
        file = ScorerFile.read(store, ScorerFile.PLACE)
        if len(file.files) != 1:
            raise DataError(f"{folder} lists {len(file.files)} files of weights", ScorerFile.REMEDY)
        (entry,) = file.files
        scorer = cls(file.scale, file.backbone, device)
        # The trained weights fit only the backbone that they were trained on, whatever it is called.
        if scorer.reader.producer() != file.producer:
            raise ConfigError(f"{file.backbone!r} is another network than that of {folder}", "get that one")
        tensors = read_tensors(read_file(store, "", entry), store.name(entry.path))
        own = scorer._trained
        if {n: t.shape for n, t in tensors.items()} != {n: t.shape for n, t in own.items()}:
            raise DataError(f"the weights of {folder} do not fit its scale and backbone", ScorerFile.REMEDY)
        # Not strict: the file has what was trained, and the frozen backbone brings its own.
        scorer.load_state_dict(tensors, strict=False)
        return scorer.eval(), file


def split(labels: Labels, share: float, seed: int) -> tuple[Any, Any]:
    """Rows of the first and the second stage; a group is wholly in one. `DataError` for one group."""
    # Pictures of one group look alike: on both sides, the voter would see what the heads have learned.
    groups = sorted(set(labels.groups))
    if len(groups) < 2:
        raise DataError("all labelled pictures are of one group", "give more, or no column 'group'")
    second = round(min(max(share * len(groups), 1), len(groups) - 1))
    held = set(np.random.default_rng(seed).permutation(groups)[:second].tolist())
    late = np.array([group in held for group in labels.groups])
    return np.flatnonzero(~late), np.flatnonzero(late)


def default_training(backbone: str) -> Training:
    """Settings by kind of backbone: those of HumanAesExpert's script for image-text models."""
    return Training(epochs=1, batch=16, rate=1e-4) if backbone.startswith(VLM) else Training()
