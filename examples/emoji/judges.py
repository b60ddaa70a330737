"""Pictures of a model, drawn once and seen by many judges.

A distance by one network, at one size, on one number of axes may flatter one side. Here the same pictures
are held against the same real ones by EfficientNet-Lite2 at several sizes and axes, by plain pixels, and by
a small network that learned from the training rows alone which caption belongs to which picture. That last
one also tells how often a picture finds its own caption among a hundred.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from guides import GuidedByThemselves, earlier, with_bank
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.base.rng import generator
from atoll.campaign.folder import Campaign
from atoll.campaign.runs import Run, RunPlan, experts_of
from atoll.data.samples import Samples
from atoll.encoders.vision import extractor
from atoll.measure.metrics.frechet import frechet_distance
from atoll.measure.metrics.projection import Projection
from atoll.measure.models import Candidate, Drawn, RowConditions, published, samples_of
from atoll.measure.pictures import Features, Folder, Rows, extraction
from atoll.measure.points import evaluate
from atoll.model.bank import Bank
from atoll.model.generation import Generation

JUDGES: dict[str, dict[str, Any]] = {
    **{
        f"Lite2, {size} px, {axes} axes": {"extractor_size": size, "components": axes}
        for size, axes in ((64, 64), (64, 16), (64, 128), (64, 256), (48, 64), (128, 64))
    },
    "pixels, 16 px, 64 axes": {"extractor": "pixels", "extractor_size": 16, "components": 64},
}
"""The first chooses, and is the headline's."""
TWINS = (0.05, 0.1, 0.15)
"""Root mean squares of the difference of pixels in [-1, 1] up to which one is the other's twin or copy."""
AMONG = 100
OTHERS = ("train", "heldout")
GUIDED = "monolith null milestone"
"""The single network, its null branch that of its first milestone (a weaker one's, arXiv 2312.02696)."""
GUIDED_APART = "once null own milestone"
"""Experts of which each has the null branch of its own first milestone."""


class Alone:
    """The router of one expert."""

    def logits(self, x_t: Tensor, t: Tensor, cond: Condition) -> Tensor:
        """Zeros `(B, 1)`."""
        return x_t.new_zeros(len(x_t), 1)


def candidate_of(campaign: Campaign, model: str) -> Candidate:
    """A model of a campaign; `GUIDED` draws as an ensemble of one expert with a null branch apart."""
    device = torch.device("cpu")
    if model == GUIDED_APART:
        ensemble = published(campaign, "ensemble", device)
        runs = experts_of(campaign.config.partition.k)
        guides, digests = zip(*(earlier(campaign, run) for run in runs), strict=True)
        was = {f"{run.folder} was": digest for run, digest in zip(runs, digests, strict=True)}
        return Candidate("ensemble", {**ensemble.weights, **was}, GuidedByThemselves(ensemble.model, guides))
    if model != GUIDED:
        return published(campaign, model, device)
    monolith = published(campaign, "monolith", device).model
    guide, digest = earlier(campaign, Run("monolith"))
    weights = {"experts/0": monolith.card.weights_sha256, "experts/pretrain": digest}
    both = Bank(monolith.bank.experts, Alone(), pretrain=guide)
    return Candidate("ensemble", weights, with_bank(monolith, both))


@dataclass(frozen=True)
class Album:
    """Pictures in a folder, by number, that a model drew at captions."""

    campaign: Campaign
    folder: Path
    conditions: RowConditions
    training: Samples
    """The rows that the model learned from."""
    heldout: Samples
    """Rows that no model learned from."""

    @classmethod
    def of(
        cls, campaign: Campaign, model: str, generation: Generation, split: str, count: int, folder: Path
    ) -> "Album":
        """Draw the pictures, unless the folder holds them already."""
        candidate, dataset = candidate_of(campaign, model), campaign.dataset()
        rows, *others = (samples_of(campaign, dataset, s, candidate.model.card) for s in (split, *OTHERS))
        conditions = RowConditions.drawn(campaign, rows, split, count, generation.seed)
        source = Drawn(candidate, generation, conditions)
        about = json.dumps({**source.subject, **source.about, "count": count}, sort_keys=True)
        done = folder / "drawn.json"
        if not done.exists() or done.read_text() != about:
            folder.mkdir(parents=True, exist_ok=True)
            for batch in source.batches(range(count), 250):
                for number, picture in zip(batch.numbers, batch.pictures, strict=True):
                    picture.save(folder / f"{number:05}.png")
            done.write_text(about)
        return cls(campaign, folder, conditions, *others)

    @classmethod
    def real(cls, campaign: Campaign, split: str, count: int, folder: Path) -> "Album":
        """Training pictures in a model's place: no model is expected to come nearer to the split."""
        plan, dataset = RunPlan.read(campaign.store, Run("router").plan), campaign.dataset()
        rows, *others = (samples_of(campaign, dataset, s, plan) for s in (split, *OTHERS))
        training = others[0]
        chosen = torch.randperm(len(training), generator=generator(0, "real"))[:count].numpy()
        folder.mkdir(parents=True, exist_ok=True)
        for number, pixels in enumerate(training.latents(chosen)):
            values = ((pixels.permute(1, 2, 0) + 1) * 127.5).round().byte().numpy()
            Image.fromarray(values.squeeze()).save(folder / f"{number:05}.png")
        return cls(campaign, folder, RowConditions.drawn(campaign, rows, split, count, 0), *others)

    def distances(self, judges: Mapping[str, dict[str, Any]]) -> dict[str, float]:
        """Fréchet distance by each judge; precision and recall by the first."""
        distances: dict[str, float] = {}
        config = self.campaign.config.evaluate
        for name, settings in judges.items():
            metrics = "frechet" if distances else "frechet,precision,recall"
            chosen = type(config).parse({**config.model_dump(), **settings, "metrics": metrics}, name)
            point = evaluate(self.campaign, chosen, images=self.folder, split=self.conditions.split)
            assert point is not None
            values = {metric: value.value for metric, value in point.values.items()}
            distances |= {name: values.pop("frechet"), **values}
        return distances

    @torch.inference_mode()
    def matches(self, network: "Matcher") -> dict[str, float]:
        """How pictures follow their captions, and their Fréchet distance in the features of who says so.

        `retrieval` is the share of pictures whose own caption is the nearest of 100, the others drawn from
        the split; `retrieval of real pictures` the same of the split's own.
        """
        rows, everything = self.conditions.samples, np.arange(len(self.conditions.samples))
        texts = np.array(rows.dataset.take(rows.rows).column("caption").to_pylist())
        captions = network.of_captions(rows.conditions(everything))
        real = network.of_pictures(rows.latents(everything))
        drawn = network.of_pictures(self._pixels())

        def retrieval(pictures: Tensor, own: NDArray[np.int64]) -> float:
            draws, hits = generator(0, "retrieval"), 0
            for picture, number in zip(pictures, own, strict=True):
                others = np.flatnonzero(texts != texts[number])  # a caption may stand in several rows
                chosen = others[torch.randperm(len(others), generator=draws)[: AMONG - 1].numpy()]
                scores = captions[torch.from_numpy(np.append(chosen, number))] @ picture
                hits += int(scores.argmax()) == len(scores) - 1
            return hits / len(own)

        axes = Projection.fit(real.numpy(), min(64, len(real) // 2))
        return {
            "captions, 64 axes": frechet_distance(axes(drawn.numpy()), axes(real.numpy())),
            "retrieval": retrieval(drawn, self.conditions.index),
            "retrieval of real pictures": retrieval(real, everything),
        }

    def _pixels(self) -> Tensor:
        """All pictures, as the data set's own are."""
        mode = "L" if self.training.shape.channels == 1 else "RGB"
        files = sorted(self.folder.glob("*.png"))
        pictures = np.stack([np.atleast_3d(np.asarray(Image.open(file).convert(mode))) for file in files])
        return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1

    def without_twins(self, extractor_size: int, components: int) -> dict[str, float]:
        """The distance without rows that have a twin among the training pictures, on either side.

        Beside it `twins`, the share of the split's rows that have one; `copies`, that of the drawn; and both
        within each further bound. Without them a model that copies the training rows looks good.
        """

        def flat(samples: Samples) -> Tensor:
            return samples.latents(np.arange(len(samples))).flatten(1)

        rows, known = flat(self.conditions.samples), flat(self.training)
        real_apart, drawn_apart = (
            (torch.cdist(pixels, known) / known.shape[1] ** 0.5).amin(1).numpy()
            for pixels in (rows, self._pixels().flatten(1))
        )
        shares = {
            f"{name} within {bound:g}" if bound != TWINS[0] else name: float((apart <= bound).mean())
            for bound in TWINS
            for name, apart in (("twins", real_apart), ("copies", drawn_apart))
        }
        alone = real_apart > TWINS[0]
        encoder = extractor(self.campaign.config.evaluate.extractor, extractor_size)
        pictures = Folder(self.folder), Rows(self.campaign.dataset(), self.conditions.split)
        both = [extraction(self.campaign.store, each, encoder, "pictures", 250) for each in pictures]
        drawn, real = (Features.of(rows.whole()) for rows in both)
        for rows in both:
            rows.tidy()
        axes, kept = Projection.fit(real.rows[alone], components), alone[self.conditions.index]
        distance = frechet_distance(axes(drawn.rows[kept]), axes(real.rows[alone]))
        return {"without twins": distance, **shares}


class Matcher(nn.Module):
    """Two towers that put a picture beside its caption (Radford et al. 2021, arXiv 2103.00020, in small)."""

    def __init__(self, channels: int, text_width: int, width: int = 128) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((channels, 32), (32, 64), (64, width), (width, width)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.GELU()]
        self.picture = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(width))
        self.text = nn.Sequential(nn.Linear(text_width, 256), nn.GELU(), nn.Linear(256, width))
        self.log_scale = nn.Parameter(torch.tensor(2.0))

    def of_pictures(self, pixels: Tensor) -> Tensor:
        """Unit vectors `(B, D)` of pictures `(B, C, H, W)` in [-1, 1]."""
        return nn.functional.normalize(self.picture(pixels), dim=1)

    def of_captions(self, cond: Condition) -> Tensor:
        """Unit vectors `(B, D)` of text states, averaged over their tokens."""
        assert cond.text is not None and cond.mask is not None
        mask = cond.mask[..., None].float()
        mean = (cond.text * mask).sum(1) / mask.sum(1)
        return nn.functional.normalize(self.text(mean), dim=1)

    def loss(self, pixels: Tensor, cond: Condition) -> Tensor:
        """Cross-entropy of finding captions by pictures and pictures by captions, within the batch."""
        scores = self.log_scale.exp() * self.of_pictures(pixels) @ self.of_captions(cond).T
        own = torch.arange(len(scores))
        return (nn.functional.cross_entropy(scores, own) + nn.functional.cross_entropy(scores.T, own)) / 2


def matcher(samples: Samples, path: Path, epochs: int = 30, batch: int = 256) -> Matcher:
    """The matcher of training rows, trained unless the file is there. Pictures are shifted by up to 2 px."""
    torch.manual_seed(0)
    network = Matcher(samples.shape.channels, samples.shape.text_width)
    # The lazy layer takes its shape, and its initial weights, from a first call.
    network.of_pictures(torch.zeros(1, samples.shape.channels, samples.shape.size, samples.shape.size))
    if path.exists():
        network.load_state_dict(load_file(path))
        return network.eval()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.1)
    batch = min(batch, len(samples))
    steps = len(samples) // batch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=epochs * steps)
    for _ in range(epochs):
        order = torch.randperm(len(samples)).numpy()
        for step in range(steps):
            index = order[step * batch :][:batch]
            pixels, cond = samples.latents(index), samples.conditions(index)
            moves = (tuple(torch.randint(-2, 3, (2,)).tolist()) for _ in pixels)
            moved = [torch.roll(one, move, dims=(1, 2)) for one, move in zip(pixels, moves, strict=True)]
            loss = network.loss(torch.stack(moved), cond)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    save_file(network.state_dict(), path)
    return network.eval()
