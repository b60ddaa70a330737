"""What looks at pictures and answers: frozen features with a small network, or an image-text model.

Both are asked for the whole or for every dimension, and give a state, which heads score, and logits of the
levels. The language-model head of an image-text model is its own, frozen; LoRA changes the layers below.
Features go with statistics of the picture's own pixels, which networks that tell things apart have learned
not to see, in the manner of natural scene statistics (Mittal et al. 2012, BRISQUE).
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, interpolate

from atoll.base.errors import ConfigError, extra
from atoll.curate.aesthetics.scale import Scale
from atoll.encoders.image_text import chat_prompt, inputs_of, load_image_text
from atoll.encoders.registry import weights_hash
from atoll.encoders.vision import extractor

Pictures = Sequence[Image.Image]
VLM = "vlm:"
"""Begins the name of a backbone that is an image-text model."""
LARGEST = 2048
"""Most pixels of a side that a vision encoder looks at."""
SCALES = 4
TONES = torch.tensor([0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99])
DETAIL = torch.tensor([0.1, 0.5, 0.9, 0.99])
WIDTH = 3 * 2 + len(TONES) + SCALES * (len(DETAIL) + 4) + 2 * 3
SAMPLED = 1024
"""Values that quantiles are taken of, about."""
SIDE = 256
"""Most pixels of a side; of larger pictures the middle counts."""


class Reading(NamedTuple):
    """Of B pictures: states `(B, W)`, logits `(B, L)` of the whole's level or None, loss of the answers."""

    state: Tensor
    levels: Tensor | None
    loss: Tensor


def reader(backbone: str, scale: Scale, device: str = "cpu") -> "FeatureReader | LanguageReader":
    """A reader by its backbone's name: `vlm:` and a folder or hub name, or a vision encoder, as in
    `efficientnet-lite2`, with `@` and the size in pixels at which it looks."""
    if backbone.startswith(VLM):
        return LanguageReader(backbone.removeprefix(VLM), scale, device)
    name, _, size = backbone.partition("@")
    if size and not (size.isdecimal() and 16 <= int(size) <= LARGEST):
        what = f"backbone {backbone[:100]!r} has no size from 16 to {LARGEST}"
        raise ConfigError(what, "write for example NAME@128")
    return FeatureReader(name, int(size) if size else None, scale, device)


class FeatureReader(nn.Module):
    """Frozen features, and a small network that answers from them: for CPUs."""

    frozen = True

    def __init__(self, name: str, size: int | None, scale: Scale, device: str, width: int = 256) -> None:
        super().__init__()
        self.encoder, self.scale, self.width = extractor(name, size, device), scale, width
        self.outer = nn.Sequential(
            nn.LayerNorm(self.encoder.width), nn.Dropout(0.5), nn.Linear(self.encoder.width, width)
        )
        self.pixels = nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, width))
        self.question = nn.Embedding(2, width)
        self.inner = nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width), nn.GELU())
        self.answer = nn.Linear(width, len(scale.names) * len(scale.levels))
        self.to(device)

    def producer(self) -> dict[str, Any]:
        """The encoder or model that reads, by name and hash."""
        return self.encoder.producer()

    def look(self, pictures: Pictures) -> Tensor:
        """Features, and statistics of the pixels, `(B, D + WIDTH)`."""
        return torch.cat([self.encoder.encode(pictures), statistics(pictures)], dim=1)

    def forward(self, seen: Tensor, whole: bool, levels: Tensor | None = None) -> Reading:
        """State and answers of a batch; with `levels` (-1: unknown) the loss too."""
        seen = seen.to(self.question.weight.device)
        features, pixels = seen[:, :-WIDTH], seen[:, -WIDTH:]
        state = self.inner(self.outer(features) + self.pixels(pixels) + self.question.weight[int(whole)])
        logits = self.answer(state).unflatten(1, (len(self.scale.names), -1))
        of_whole, loss = logits[:, self.scale.root], state.new_zeros(())
        if levels is not None:
            asked = of_whole if whole else logits.flatten(0, 1)
            loss = cross_entropy(asked, levels.to(state.device).flatten(), ignore_index=-1)
        return Reading(state, of_whole, loss)


class LanguageReader(nn.Module):
    """Any image-text model of transformers, by folder or hub name, with LoRA of a rank on every linear layer
    but the head. Code beside the weights is not run.

    Raises:
        ConfigError: there is no such model, peft is missing, or two levels begin with the same token.
    """

    frozen = False

    def __init__(self, name: str, scale: Scale, device: str, rank: int = 8) -> None:
        super().__init__()
        with extra("vlm", "image-text models are trained by the package peft"):
            import peft
        self.name, self.scale = name, scale
        model, self.processor = load_image_text(name)
        self._hash = weights_hash(model)
        lora = peft.LoraConfig(r=rank, lora_alpha=4 * rank, lora_dropout=0.05, target_modules="all-linear")
        with warnings.catch_warnings():  # peft asks transformers by a name that it will drop
            warnings.simplefilter("ignore", FutureWarning)
            self.model = peft.get_peft_model(model, lora).to(device)
        self.width = int(model.config.get_text_config().hidden_size)
        self.tokenizer: Any = self.processor.tokenizer
        self._before = self._ids(scale.answer.removesuffix("{level}").rstrip())
        self._words = [ids[0] for ids in map(self._ids, (f" {word}" for word in scale.words)) if ids]
        if len(set(self._words)) < len(scale.levels):
            raise ConfigError(f"{name!r} begins two of the levels with one token", "choose other words")

    def producer(self) -> dict[str, Any]:
        """The encoder or model that reads, by name and hash."""
        return {"name": VLM + self.name, "hash": self._hash}

    def look(self, pictures: Pictures) -> list[Image.Image]:
        """The images themselves: the processor of the model takes them."""
        return [picture.convert("RGB") for picture in pictures]

    def forward(self, seen: Pictures, whole: bool, levels: Tensor | None = None) -> Reading:
        """State and answers of a batch; with `levels` (-1: unknown) the loss too."""
        # A picture's own question is drawn in training, so that no one wording is learned.
        drawn = [0] * len(seen) if levels is None else torch.randint(1 << 16, (len(seen),)).tolist()
        texts = [chat_prompt(self.processor, self.scale.question(number, whole)) for number in drawn]
        inputs = inputs_of(self.processor, texts, seen)
        length = inputs["input_ids"].shape[1]
        answers = [self._before if whole else []] * len(seen)
        if levels is not None:
            answers = [self._answer(level, whole) for level in levels.tolist()]
        filler = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        ids = torch.full((len(answers), max(map(len, answers))), next(n for n in filler if n is not None))
        there = torch.zeros_like(ids)
        for row, answer in enumerate(answers):
            ids[row, : len(answer)], there[row, : len(answer)] = torch.tensor(answer, dtype=torch.long), 1
        # Some processors give more per token than these two, such as token types: zeros for the answers.
        more = {"input_ids": ids, "attention_mask": there}
        for key, value in inputs.items():
            if value.ndim == 2 and value.shape[1] == length:
                inputs[key] = torch.cat([value, more.get(key, torch.zeros_like(ids))], dim=1)
        given = {key: value.to(self.model.device) for key, value in inputs.items()}
        read = self.model(**given, output_hidden_states=True)
        # Logits at a place are those of the next token: hence the place before the level.
        of_whole = read.logits[:, length + len(self._before) - 1, self._words] if whole else None
        loss = read.logits.new_zeros(())
        if levels is not None:
            # -100 is the target that cross_entropy leaves out.
            right = ids.where(there.bool(), torch.tensor(-100)).to(read.logits.device)
            loss = cross_entropy(read.logits[:, length - 1 : -1].flatten(0, 1).float(), right.flatten())
        levels_of = None if of_whole is None else of_whole.float()
        return Reading(read.hidden_states[-1][:, length - 1].float(), levels_of, loss)

    def _ids(self, text: str) -> list[int]:
        return [int(number) for number in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _answer(self, levels: Any, whole: bool) -> list[int]:
        ids = [*self._before, self._words[levels]] if whole else self._ids(self.scale.answers(levels))
        return ids if self.tokenizer.eos_token_id is None else [*ids, self.tokenizer.eos_token_id]


def statistics(pictures: Sequence[Image.Image]) -> Tensor:
    """Statistics `(B, WIDTH)` of pictures of any size and mode, most of them within [-2, 2]."""
    values = torch.empty(len(pictures), WIDTH)
    # Pictures of one size are taken together: one by one, calls would cost more than the pixels.
    by_size: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
    for number, picture in enumerate(pictures):
        colours = picture.convert("YCbCr")
        left, top = ((side - min(side, SIDE)) // 2 // 8 * 8 for side in colours.size)
        width, height = (min(side, SIDE) for side in colours.size)
        pixels = torch.from_numpy(np.array(colours.crop((left, top, left + width, top + height))))
        by_size.setdefault((width, height), []).append((number, pixels))
    for members in by_size.values():
        numbers, each = zip(*members, strict=True)
        values[list(numbers)] = _of_one_size(torch.stack(each).permute(0, 3, 1, 2).contiguous() / 255)
    return values


def _of_one_size(here: Tensor) -> Tensor:
    """Of pictures `(B, 3, H, W)` in [0, 1]."""
    light, count = here[:, 0], len(here)
    mean = here.mean((2, 3))
    spread = (here.square().mean((2, 3)) - mean.square()).clamp(min=0).sqrt()
    parts = [mean, spread * 4, _quantiles(light, TONES)]
    for _ in range(SCALES):
        if min(here.shape[2:]) < 2:
            parts.append(torch.zeros(count, len(DETAIL) + 4))
            continue
        coarse = avg_pool2d(here, 2)
        fine = interpolate(coarse, scale_factor=2.0, mode="nearest")
        lost = (here[:, :, : fine.shape[2], : fine.shape[3]] - fine).abs()
        spread = lost[:, :1].square().mean((2, 3)).sqrt()
        energy = torch.cat([_quantiles(lost[:, 0], DETAIL), spread, lost.mean((2, 3))], dim=1)
        # The sum keeps the logarithm of a flat picture finite.
        parts.append((energy + 1e-3).log() / 2 + 2)
        here = coarse
    # JPEG's blocks are 8 pixels wide: where it left them, every eighth difference is larger than the others.
    for axis in (1, 2):
        steps = light.diff(dim=axis).abs()
        lines = steps.mean(3 - axis) if steps.numel() else torch.zeros(count, 8)
        mean = lines.mean(1)
        # Number 7 lies between pixels 7 and 8, where the first block ends: crops begin with a block.
        grid = (lines[:, 7::8] if lines.shape[1] > 7 else lines).mean(1)
        flat = (steps < 0.005).float().sum((1, 2)) / max(1, steps[0].numel())
        parts.append(torch.stack([mean * 4, grid / (mean + 1e-3) - 1, flat], dim=1))
    return torch.cat(parts, dim=1)


def _quantiles(values: Tensor, shares: Tensor) -> Tensor:
    # Every so-and-so-many-th value: a sort of all pixels would cost most of the time.
    flat = values.flatten(1)
    return flat[:, :: max(1, flat.shape[1] // SAMPLED)].quantile(shares, dim=1).T
