"""Pictures to latents and back: a diffusers autoencoder by name, or pixels as they are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from atoll.base.device import encoding_precision, in_parts
from atoll.base.errors import ConfigError, DataError
from atoll.base.pictures import to_images
from atoll.encoders.registry import AUTOENCODERS, KNOWN, is_that_of, loading, weights_hash

AT_ONCE = 4 * 2**20
"""Pixels that an autoencoder takes at once: its activations need about 600 bytes for each, in bf16."""


@dataclass
class Autoencoder:
    """Latents are `(z - shift) * scale` of the posterior mode; pixels are in [-1, 1].

    Where its config has `latents_mean` and `latents_std`, a number for each channel, latents are
    `(z - mean) / std * scale`, as in diffusers. Named `none` it has no network, and pixels are the latents.
    """

    name: str
    network: nn.Module | None = None
    shift: float = 0.0
    scale: float = 1.0
    device: str = "cpu"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def producer(self) -> dict[str, Any]:
        """What made a column of latents: name, weights' hash and the constants."""
        weights = weights_hash(self.network) if self.network is not None else ""
        channels = {"mean": [*self.mean], "std": [*self.std]} if self.mean else {}
        return {"name": self.name, "hash": weights, "shift": self.shift, "scale": self.scale, **channels}

    def _mean_and_std(self, like: Tensor) -> tuple[Tensor | float, Tensor | float]:
        if not self.mean:
            return self.shift, 1.0
        mean, std = (like.new_tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return mean, std

    @property
    def factor(self) -> int:
        """Pixels of a picture's side for each element of a latent's."""
        return 1 if self.network is None else _factor(self.network.config)  # type: ignore[arg-type]

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Image.Image]) -> Tensor:
        """Latents `(B, C, H, W)` float32 of pictures of one size (C is 1 for grey pixels without a VAE)."""
        if self.network is None:
            return _pixels(pictures)
        images, network = _pixels([p.convert("RGB") for p in pictures]), self.network

        def encode(part: Tensor) -> Tensor:
            with encoding_precision(self.device):
                (z,) = network.encode(part.to(self.device), return_dict=False)  # type: ignore[operator]
            # The mode, not a draw: a column must be the same whenever it is written. AutoencoderDC and
            # AutoencoderTiny have no posterior.
            return (z if isinstance(z, Tensor) else z.mode()).float().cpu()

        z = in_parts(encode, images, max(1, AT_ONCE // images[0, 0].numel()))
        mean, std = self._mean_and_std(z)
        return (z - mean) / std * self.scale

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """Pixels `(B, 3 or 1, H, W)` float32 of latents: in [-1, 1], or NaN where they are no number."""
        pixels = latents
        if self.network is not None:
            z, network = latents.to(self.device) / self.scale, self.network
            mean, std = self._mean_and_std(z)
            z = z * std + mean

            def decode(part: Tensor) -> Tensor:
                with encoding_precision(z.device):
                    return network.decode(part).sample.float().cpu()  # type: ignore[no-any-return,operator]

            # On the CPU one by one: as fast, and convolutions of another batch size would move last bits.
            area = z[0, 0].numel() * self.factor**2
            pixels = in_parts(decode, z, 1 if z.device.type == "cpu" else max(1, AT_ONCE // area))
        # clamp() lets NaN pass but turns infinity into white.
        return pixels.clamp(-1, 1).masked_fill(~torch.isfinite(pixels), torch.nan)

    def pictures(self, latents: Tensor, numbers: Sequence[int] | None = None) -> list[Image.Image]:
        """Pictures of latents `(B, C, H, W)`; an error names a broken one by its number (from 0 on)."""
        pixels = self.decode(latents)
        # In 8 bits NaN would be grey and infinity white, and look like a picture.
        broken = ~torch.isfinite(pixels).flatten(1).all(dim=1)
        if bool(broken.any()):
            first = int(broken.nonzero()[0])
            what = f"picture {first if numbers is None else numbers[first]} holds NaN or infinity"
            fix = "the weights are of no use: look at the training's losses"
            raise DataError(f"{what} ({int(broken.sum())} of {len(pixels)} in its batch)", fix)
        return to_images(pixels)


def autoencoder(name: str, device: str = "cpu") -> Autoencoder:
    """Load an autoencoder: `none`, or a folder or hub name of one of diffusers' `AUTOENCODERS`."""
    if name == "none":
        return Autoencoder("none")
    import diffusers

    with loading("VAE", name, "use 'none', a folder, or a hub name that can be reached"):
        kind = diffusers.AutoencoderKL.load_config(name).get("_class_name", "AutoencoderKL")
        if kind not in AUTOENCODERS:
            raise ValueError(f"it is a {kind}; known are {', '.join(AUTOENCODERS)}")
        network = getattr(diffusers, kind).from_pretrained(name, use_safetensors=True)
        network = network.eval().requires_grad_(False).to(device)
        if str(device) != "cpu":  # convolutions in bf16 are fastest with channels last
            network = network.to(memory_format=torch.channels_last)
    return Autoencoder(name, network, device=device, **constants_of(network.config))


def constants_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Constants of latents, as fields of `Autoencoder`: of a VAE's config, or of what it is as a producer."""
    names = {"shift": "shift_factor", "scale": "scaling_factor", "mean": "latents_mean", "std": "latents_std"}
    found = {name: values.get(long) or values.get(name) for name, long in names.items()}
    try:
        shift, scale = float(found["shift"] or 0.0), float(found["scale"] or 1.0)
        mean, std = (tuple(map(float, found[name] or ())) for name in ("mean", "std"))
        sound = len(mean) == len(std) and all(width > 0 for width in std)
        if not sound or not math.isfinite(sum((shift, scale, *mean, *std))):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        what = f"{', '.join(names.values())} of the VAE are no constants of latents"
        raise ConfigError(what, "mend its config.json") from None
    return {"shift": shift, "scale": scale, "mean": mean, "std": std}


def _factor(config: Mapping[str, Any]) -> int:
    levels = config.get("block_out_channels") or config.get("encoder_block_out_channels")
    if not levels:
        raise ValueError("its config has no block_out_channels")
    return int(2 ** (len(levels) - 1))


def latent_size(name: str, size: int) -> tuple[int, int]:
    """Channels and side of the latents of `size` px pictures, from the VAE's name or config: no weights."""
    known = KNOWN.get(name)
    if known and known.latent[0]:
        channels, factor = known.latent
    else:
        import diffusers

        with loading("VAE", name, "use 'none', a folder or a hub name"):
            config = diffusers.AutoencoderKL.load_config(name)
            channels, factor = int(config.get("latent_channels") or 0), _factor(config)
            if not channels:
                raise ValueError("its config has no latent_channels")
    if size % factor:
        raise ConfigError(f"pictures of {size} px do not divide by {factor}, as {name} asks", "change size")
    return channels, size // factor


def autoencoder_of(producer: Mapping[str, Any], device: str = "cpu", place: str | None = None) -> Autoencoder:
    """The autoencoder that made a column of latents, by its name or from a copy's folder, `place`."""
    vae = autoencoder(place or producer["name"], device)
    vae.name = producer["name"]
    # Other weights under the same name would decode every picture a little wrong, and nothing would say so.
    other = [key for key, value in vae.producer().items() if key != "hash" and producer.get(key) != value]
    if other or (vae.network is not None and not is_that_of(vae.network, producer)):
        raise ConfigError(f"the VAE {vae.name!r} is not the one that made the latents", "install that one")
    return vae


def _pixels(pictures: Sequence[Image.Image]) -> Tensor:
    arrays = [np.asarray(p) for p in pictures]
    stacked = torch.from_numpy(np.stack([a[..., None] if a.ndim == 2 else a for a in arrays]))
    return stacked.permute(0, 3, 1, 2).float() / 127.5 - 1.0
