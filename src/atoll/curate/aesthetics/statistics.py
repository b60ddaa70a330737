"""Statistics of a picture's own pixels: what networks that tell things apart have learned not to see.

Brightness, contrast, energy of detail by scale, flat neighbours and the grid of JPEG, in the manner of
natural scene statistics (Mittal et al. 2012, BRISQUE).
"""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

SCALES = 4
TONES = torch.tensor([0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99])
DETAIL = torch.tensor([0.1, 0.5, 0.9, 0.99])
WIDTH = 3 * 2 + len(TONES) + SCALES * (len(DETAIL) + 4) + 2 * 3
SAMPLED = 1024
"""Values that quantiles are taken of, about."""
SIDE = 256
"""Most pixels of a side; of larger pictures the middle counts."""


def statistics(pictures: Sequence[Image.Image]) -> Tensor:
    """Statistics `(B, WIDTH)` of pictures of any size and mode, most of them within [-2, 2]."""
    found = torch.empty(len(pictures), WIDTH)
    alike: dict[tuple[int, ...], list[tuple[int, Tensor]]] = {}
    for number, picture in enumerate(pictures):
        colours = picture.convert("YCbCr")
        left, top = ((side - min(side, SIDE)) // 2 for side in colours.size)
        width, height = (min(side, SIDE) for side in colours.size)
        pixels = torch.from_numpy(np.array(colours.crop((left, top, left + width, top + height))))
        alike.setdefault((width, height), []).append((number, pixels))
    for of in alike.values():
        numbers, pixels_of = zip(*of, strict=True)
        found[list(numbers)] = _of_one_size(torch.stack(pixels_of).permute(0, 3, 1, 2).contiguous() / 255)
    return found


def _of_one_size(here: Tensor) -> Tensor:
    """Of pictures `(B, 3, H, W)` in [0, 1]."""
    light, count = here[:, 0], len(here)
    mean = here.mean((2, 3))
    spread = (here.square().mean((2, 3)) - mean.square()).clamp(min=0).sqrt()
    found = [mean, spread * 4, _quantiles(light, TONES)]
    for _ in range(SCALES):
        if min(here.shape[2:]) < 2:
            found.append(torch.zeros(count, len(DETAIL) + 4))
            continue
        coarse = avg_pool2d(here, 2)
        fine = interpolate(coarse, scale_factor=2.0, mode="nearest")
        lost = (here[:, :, : fine.shape[2], : fine.shape[3]] - fine).abs()
        spread = lost[:, :1].square().mean((2, 3)).sqrt()
        energy = torch.cat([_quantiles(lost[:, 0], DETAIL), spread, lost.mean((2, 3))], dim=1)
        found.append((energy + 1e-3).log() / 2 + 2)
        here = coarse
    for axis in (1, 2):
        steps = light.diff(dim=axis).abs()
        lines = steps.mean(3 - axis) if steps.numel() else torch.zeros(count, 8)
        mean = lines.mean(1)
        grid = (lines[:, 7::8] if lines.shape[1] > 7 else lines).mean(1)
        flat = (steps < 0.005).float().sum((1, 2)) / max(1, steps[0].numel())
        found.append(torch.stack([mean * 4, grid / (mean + 1e-3) - 1, flat], dim=1))
    return torch.cat(found, dim=1)


def _quantiles(values: Tensor, shares: Tensor) -> Tensor:
    flat = values.flatten(1)
    return flat[:, :: max(1, flat.shape[1] // SAMPLED)].quantile(shares, dim=1).T
