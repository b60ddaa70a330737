"""Pictures to latents and back: a diffusers autoencoder by name, or pixels as they are."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from atoll.base.errors import ConfigError, DataError
from atoll.base.pictures import to_images
from atoll.encoders.classes import AUTOENCODERS
from atoll.encoders.hub import loading
from atoll.encoders.weights import weights_hash

# channels and factor of well-known autoencoders, so that a plan need not ask for their config
_SHAPES = dict.fromkeys(
    ("stabilityai/sd-vae-ft-mse", "stabilityai/sd-vae-ft-ema", "stabilityai/sdxl-vae", "madebyollin/taesd"),
    (4, 8),
) | {"madebyollin/taef1": (16, 8), "mit-han-lab/dc-ae-f32c32-in-1.0-diffusers": (32, 32)}


@dataclass
class Autoencoder:
    """Latents are `(z - shift) * scale` of the posterior mode; pixels are in [-1, 1].

    Of an autoencoder whose config has `latents_mean` and `latents_std`, a number for each channel, they are
    `(z - mean) / std * scale`, as diffusers' pipelines take them.

    Attributes:
        name: what the user asked for; `none` makes pixels the latents.
        network: the diffusers autoencoder, or None.
        shift: subtracted from z.
        scale: multiplied after.
        mean: of each channel of z; empty where `shift` counts.
        std: of each channel of z; empty likewise.
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

    def _by_channel(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation to be taken from z, `(1, C, 1, 1)`."""
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
        images = _pixels([p.convert("RGB") for p in pictures]).to(self.device)
        encoded = self.network.encode(images)  # type: ignore[operator]
        z = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else _first(encoded)
        if self.mean:
            mean, std = self._by_channel(z)
            return ((z - mean) / std * self.scale).float().cpu()
        return ((z - self.shift) * self.scale).float().cpu()

    @torch.inference_mode()
    def decode(self, latents: Tensor) -> Tensor:
        """Pixels `(B, 3 or 1, H, W)` float32 of latents: in [-1, 1], or NaN where they are no number."""
        if self.network is None:
            return _clamped(latents)
        z = latents.to(self.device) / self.scale
        if self.mean:
            mean, std = self._by_channel(z)
            z = z * std + mean
        else:
            z = z + self.shift
        # On the CPU one by one, which is as fast, and no picture depends on its batch.
        parts = z.split(1 if z.device.type == "cpu" else max(1, len(z)))
        decoded = torch.cat([self.network.decode(part).sample for part in parts])  # type: ignore[operator]
        return _clamped(decoded.float().cpu())

    def pictures(self, latents: Tensor, numbers: Sequence[int] | None = None) -> list[Image.Image]:
        """Pictures of latents `(B, C, H, W)`.

        Args:
            latents: of one batch.
            numbers: of the pictures, by which one that is broken is named; by default from 0 on.

        Raises:
            DataError: a picture holds NaN or infinity, which 8 bits would make grey or white.
        """
        pixels = self.decode(latents)
        broken = ~torch.isfinite(pixels).flatten(1).all(dim=1)
        if bool(broken.any()):
            first = int(broken.nonzero()[0])
            raise DataError(
                f"picture {first if numbers is None else numbers[first]} holds NaN or infinity"
                f" ({int(broken.sum())} of {len(pixels)} in its batch)",
                "the weights are of no use: look at the training's losses",
            )
        return to_images(pixels)


def autoencoder(name: str, device: str = "cpu") -> Autoencoder:
    """Load an autoencoder.

    Args:
        name: `none`, or a folder or hub name of a diffusers AutoencoderKL, AutoencoderDC or
            AutoencoderTiny, such as `stabilityai/sd-vae-ft-mse`.
        device: where it runs.

    Raises:
        ConfigError: it cannot be found.
    """
    if name == "none":
        return Autoencoder("none")
    import diffusers

    with loading("VAE", name, "use 'none', a folder, or a hub name that can be reached"), _quiet():
        settings = diffusers.AutoencoderKL.load_config(name)
        kind = settings.get("_class_name", "AutoencoderKL")
        if kind not in AUTOENCODERS:
            raise ValueError(f"it is a {kind}; known are {', '.join(AUTOENCODERS)}")
        network = getattr(diffusers, kind).from_pretrained(name, use_safetensors=True)
        network = network.eval().requires_grad_(False).to(device)
    shift = float(getattr(network.config, "shift_factor", None) or 0.0)
    scale = float(getattr(network.config, "scaling_factor", None) or 1.0)
    return Autoencoder(name, network, shift, scale, device, *channels_of(network.config))


def channels_of(values: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel: of a VAE's config, or of what it is as a producer.

    Raises:
        ConfigError: they are no numbers, as many of both.
    """
    lists = [values.get(f"latents_{name}") or values.get(name) or () for name in ("mean", "std")]
    try:
        mean, std = (tuple(map(float, one)) for one in lists)
    except (TypeError, ValueError):
        mean, std = (), (0.0,)
    if len(mean) != len(std) or not all(0 < one < math.inf for one in std):
        raise ConfigError("latents_mean and latents_std of the VAE do not fit each other", "mend its config")
    return mean, std


@contextmanager
def _quiet() -> Iterator[None]:
    """diffusers passes the hub an option that the hub has dropped."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks", category=UserWarning)
        yield


def _factor(config: Mapping[str, Any]) -> int:
    levels = config.get("block_out_channels") or config["encoder_block_out_channels"]
    return int(2 ** (len(levels) - 1))


def latent_size(name: str, size: int) -> tuple[int, int]:
    """Channels and side of the latents of `size` px pictures, from the VAE's name or config: no weights.

    Raises:
        ConfigError: its config cannot be found, or the pictures do not divide by its factor.
    """
    if name in _SHAPES:
        channels, factor = _SHAPES[name]
    else:
        import diffusers

        try:
            with _quiet():
                config = diffusers.AutoencoderKL.load_config(name)
            channels, factor = int(config["latent_channels"]), _factor(config)
        except (OSError, ValueError, KeyError):
            fix = "use 'none', a folder or a hub name, or encode first: atoll data encode"
            raise ConfigError(f"cannot tell the latents' shape of the VAE {name!r}", fix) from None
    if size % factor:
        raise ConfigError(f"pictures of {size} px do not divide by {factor}, as {name} asks", "change size")
    return channels, size // factor


def autoencoder_of(producer: Mapping[str, Any], device: str = "cpu", place: str | None = None) -> Autoencoder:
    """The autoencoder that made a column of latents; `ConfigError` if its weights are others by now.

    Args:
        producer: what the column says of it.
        device: where it runs.
        place: folder of a copy; by default it is looked for by its name.
    """
    vae = autoencoder(place or producer["name"], device)
    vae.name = producer["name"]
    if "mean" not in producer:  # earlier versions did not look at latents_mean
        vae.mean, vae.std = (), ()
    if any(producer.get(key) != value for key, value in vae.producer().items()):
        raise ConfigError(f"the VAE {vae.name!r} is not the one that made the latents", "install that one")
    return vae


def _clamped(pixels: Tensor) -> Tensor:
    return pixels.clamp(-1, 1).masked_fill(~torch.isfinite(pixels), torch.nan)


def _pixels(pictures: Sequence[Image.Image]) -> Tensor:
    arrays = [np.asarray(p) for p in pictures]
    stacked = torch.from_numpy(np.stack([a[..., None] if a.ndim == 2 else a for a in arrays]))
    return stacked.permute(0, 3, 1, 2).float() / 127.5 - 1.0


def _first(encoded: Any) -> Tensor:
    return encoded.latent if hasattr(encoded, "latent") else encoded.latents  # type: ignore[no-any-return]
