"""What a model drew: images with their prompts, to look at in a notebook and to write to files."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.base.pictures import FORMATS, grid, picture_place, png
from atoll.base.text import many
from atoll.model.dispatch import Trace
from atoll.model.generation import Generation, Residency
from atoll.model.residency import ResidentExperts
from atoll.networks.storage import STORED, brought_back, stored_layers, write_stored

if TYPE_CHECKING:  # a model checks its weights by this module
    from atoll.model.model import Model

PROMPTS = ("a red apple on a table", "a dog in the snow", "a street at night", "the letter a")
"""Of the pictures that show what stored weights change."""


@dataclass(frozen=True, repr=False)
class Pictures(Sequence[Any]):
    """Images by number, which expert served which step (None for one network), and how they were drawn.

    `prompts` are what they show, an equal number of pictures of each one after the other.
    """

    images: list[Image.Image]
    routing: Trace | None
    generation: Generation
    prompts: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: Any, /) -> Any:
        return self.images[number]

    def __repr__(self) -> str:
        how, (width, height) = self.generation, self[0].size
        drawn = f"{many(how.steps, 'step')}, guidance {how.guidance:g}, seed {how.seed}"
        return f"{many(len(self), 'picture')} of {width}x{height}, {drawn}"

    @property
    def labels(self) -> list[str]:
        """What each picture shows."""
        each = len(self) // max(1, len(self.prompts))
        return [prompt for prompt in self.prompts or ("",) for _ in range(each)]

    def sheet(self) -> Image.Image:
        """All of them with their prompts, a row of each prompt; small ones are magnified."""
        each = len(self) // max(1, len(self.prompts))
        scale = -(-128 // self[0].width)
        return grid(self, min(each, 8) if each > 1 else 4, pad=6, labels=self.labels, scale=scale)

    def _repr_png_(self) -> bytes:
        return png(self.sheet())

    def save(self, place: str | Path) -> list[Path]:
        """Write a sheet, or into a folder (its name ends in a slash) a PNG of each; the files.

        The ending of a sheet's name decides its format: .png, .jpg or .webp.
        """
        path, is_folder = picture_place(place)
        files = {path: self.sheet()}
        if is_folder:
            names = [re.sub(r"\W+", "-", text)[:60].strip("-") for text in self.labels]
            files = {
                path / ("-".join(filter(None, (f"{n:04d}", name))) + ".png"): image
                for n, (name, image) in enumerate(zip(names, self, strict=True))
            }
        for file, image in files.items():
            try:
                image.save(file, FORMATS[file.suffix.lower()], quality=95)
            except OSError as error:
                what = f"cannot write {file}: {error.strerror or error}"
                raise ConfigError(what, "give another place") from None
        return [*files]


def check_storage(load: Callable[[], "Model"], residency: Residency, model: "Model") -> None:
    """Compare pictures of the same noise with those of the model that `load` gives, whose weights are whole.

    `ConfigError` beyond `residency.bound`; it names the layers that change the velocity most.
    """
    plain, how = load(), model.generation.with_(steps=min(model.generation.steps, 20), seed=0)
    plain.vae = model.vae
    if model.card.text is not None:  # not twice on the device
        plain.encoder = model.encoder
    if how.routing.needs_labels:
        how = how.with_(routing="top-1")
    classes = [str(n) for n in range(min(len(PROMPTS), model.card.shape.classes))]
    prompts = {"text": [*PROMPTS], "class": classes}.get(model.card.condition, [])
    drawn = [one(prompts, 1 if prompts else len(PROMPTS), how) for one in (plain, model)]
    distances = [dissimilarity(*pair) for pair in zip(*drawn, strict=True)]
    distance, experts = sum(distances) / len(distances), plain.bank.experts  # one network is a plain list
    say(f"{residency.dtype}: images at distance {distance:.4f} from those of whole weights, same noise")
    if distance > residency.bound:
        expert: Any = experts[next(n for n in range(len(experts)) if n not in plain.bank.missing)]
        x, noise = torch.empty(1, *model.shape), torch.Generator().manual_seed(0)
        cond, _ = plain.conditions(prompts).of([0], model.device)
        call = x.normal_(generator=noise).to(model.device), torch.full((1,), 0.5, device=model.device), cond
        changes = dict[str, float]()
        # With gradients on no CUDA graph is replayed, which would not see that weights are others.
        with torch.enable_grad():
            whole = expert.velocity(*call)
            for name, layer in stored_layers(expert.network, residency.keep).items():
                weight = layer.get_parameter("weight")
                stored = torch.empty_like(weight, dtype=STORED[residency.dtype])
                scales = weight.new_empty(len(weight), dtype=torch.float32)
                write_stored(weight, stored, scales)
                layer.__dict__["weight"] = brought_back(stored, scales, weight.dtype)
                changes[name] = float((expert.velocity(*call) - whole).square().mean())
                del layer.__dict__["weight"]
        worst = ",".join(sorted(changes, key=lambda name: -changes[name])[:4])
        far = f"distance {distance:.3f}, over residency.bound={residency.bound:g}"
        fix = f"leave layers as they are, first residency.keep=[{worst}], or take another residency.dtype"
        raise ConfigError(f"images by {residency.dtype} have {far}", fix)
    if isinstance(experts, ResidentExperts):
        experts.close()


def dissimilarity(one: Image.Image, other: Image.Image) -> float:
    """1 - SSIM (Wang et al. 2004) of brightness, windows of 7 px: 0 for equal pictures, near 1 for unlike."""
    gray = (np.asarray(image.convert("L"), np.float64) / 255 for image in (one, other))
    a, b = (torch.from_numpy(values)[None, None] for values in gray)
    side = min(7, *a.shape[2:])

    def mean(values: Tensor) -> Tensor:
        return avg_pool2d(values, side, stride=1)

    light, contrast = 0.01**2, 0.03**2
    product = mean(a * b) - mean(a) * mean(b)
    spread = mean(a * a) - mean(a) ** 2 + mean(b * b) - mean(b) ** 2
    alike = (2 * mean(a) * mean(b) + light) * (2 * product + contrast)
    ssim = alike / ((mean(a) ** 2 + mean(b) ** 2 + light) * (spread + contrast))
    return float(1 - ssim.mean())
