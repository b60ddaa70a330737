"""Networks that judge pictures, by name: Inception, CLIP, and the vision encoders that also cluster."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from urllib.error import URLError

import torch
from torch import Tensor, nn

from atoll.base.errors import ConfigError, first_line, nearest
from atoll.encoders.registry import loading
from atoll.encoders.text import knows_words
from atoll.encoders.vision import VisionEncoder, standardised, vision_encoder

NAMES = ("inception", "efficientnet-lite0", "efficientnet-lite2", "pixels")
"""Extractors with a name of their own; others are folders or hub names of DINOv2 and CLIP models."""
FID_WEIGHTS = "6726825d"
"""First digits of the SHA-256 of torch-fidelity's weights of Inception, as their file's name has them."""
TENSORFLOW = "bilinear without antialiasing, in the network (TensorFlow 1)"
"""How Inception's pictures are resized, by the published FID and by ADM's evaluation alike."""

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)


def extractor(name: str, size: int | None = None, device: str = "cpu") -> VisionEncoder:
    """Load a network that judges.

    Args:
        name: `inception` (the one of the published FID, through torch-fidelity, extra `fid`; `inception:FILE`
            reads its weights from a file), `efficientnet-lite0`, `efficientnet-lite2`, or a folder or hub
            name of a transformers DINOv2 or CLIP model such as `openai/clip-vit-large-patch14-336`. A
            DINOv2 gives its class token here; to cluster by, `vision_encoder` takes the patch tokens' mean.
            `pixels` are the picture's own values at 16 px: a judge that is akin to no network.
        size: side in pixels that it sees; by default its own. Inception has no other.

    Raises:
        ConfigError: it cannot be found, or is of another kind.
    """
    if name.partition(":")[0] == "inception":
        return _inception(name, size, device)
    if name == "pixels":
        side = size or 16
        width, network = 3 * side * side, nn.Flatten()
        own = VisionEncoder(name, network, side, width, lambda x: x / 127.5 - 1, lambda net, x: net(x))
        return replace(own, device=device, kind="pixels")
    if "/" not in name and name not in NAMES:
        known = [*NAMES, "facebook/dinov2-base", "openai/clip-..."]
        raise ConfigError(f"unknown extractor {name!r}", nearest(name, known))
    if "/" in name:
        import transformers

        with loading("extractor", name):
            config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        if config.model_type == "clip":
            return _clip(name, size, device)
    encoder = vision_encoder(name, size, device)
    return replace(encoder, pool=_class_token, token="class") if encoder.kind == "dinov2" else encoder


def _class_token(network: Any, pixels: Tensor) -> Tensor:
    # The published distances on DINOv2 (Stein et al. 2023) are taken on the class token after the norm.
    token: Tensor = network(pixel_values=pixels).pooler_output
    return token


@dataclass
class ClipEncoder(VisionEncoder):
    """CLIP: features are the projected embeddings of pictures; texts have embeddings in the same space."""

    tokenizer: Any = None

    @torch.inference_mode()
    def texts(self, captions: Sequence[str]) -> Tensor:
        """Projected embeddings `(N, D)` float32 of captions; what is longer than CLIP takes is cut.

        Raises:
            ConfigError: there is no tokenizer.
        """
        if self.tokenizer is None:
            raise ConfigError(f"{self.name!r} has no tokenizer", "add its tokenizer's files")
        network: Any = self.network
        length = int(network.config.text_config.max_position_embeddings)
        tokens = self.tokenizer(
            list(captions), padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(self.device)
        pooled = network.text_model(tokens["input_ids"], tokens["attention_mask"]).pooler_output
        return cast(Tensor, network.text_projection(pooled)).float().cpu()


def _clip(name: str, size: int | None, device: str) -> ClipEncoder:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with loading("extractor", name):
        network = transformers.CLIPModel.from_pretrained(name, use_safetensors=True)
        network = network.eval().requires_grad_(False).to(device)
    side = int(network.config.vision_config.image_size)
    if size not in (None, side):
        raise ConfigError(f"{name!r} sees pictures of {side} px, not {size}", "leave the size out")

    def pool(net: Any, pixels: Tensor) -> Tensor:
        embeddings: Tensor = net.visual_projection(net.vision_model(pixels).pooler_output)
        return embeddings

    tokenizer = None
    try:
        found = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        tokenizer = found if knows_words(found) else None
    except Exception:  # transformers 4 raises TypeError where there is none, others other errors
        pass
    width, normalise = int(network.config.projection_dim), standardised(_MEAN, _STD, device)
    return ClipEncoder(name, network, side, width, normalise, pool, device, kind="clip", tokenizer=tokenizer)


def _inception(name: str, size: int | None, device: str) -> VisionEncoder:
    if size not in (None, 299):
        raise ConfigError(f"Inception sees pictures of 299 px, not {size}", "leave the size out")
    try:
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    except (ImportError, RuntimeError) as error:  # a torchvision that does not match torch is a RuntimeError
        raise ConfigError(
            f"the extractor 'inception' is not installed ({first_line(error)})",
            "pip install 'atoll[fid]', with the torchvision of your torch; or choose another extractor",
        ) from None
    path = name.partition(":")[2] or None
    try:
        network = FeatureExtractorInceptionV3(name, ["2048"], feature_extractor_weights_path=path)
    except (OSError, URLError, RuntimeError) as error:
        what = f"cannot load the weights of Inception: {first_line(error)}"
        raise ConfigError(what, "fetch the file, and name it: inception:FILE") from None
    network = network.eval().requires_grad_(False).to(device)

    def pool(net: nn.Module, pixels: Tensor) -> Tensor:
        features: Tensor = net(pixels)[0]
        return features

    kind = "inception" if path is None or is_published(Path(path)) else "inception of other weights"
    return VisionEncoder(
        name, network, 299, 2048, lambda x: x.to(torch.uint8), pool, device, TENSORFLOW, kind
    )


def is_published(path: Path) -> bool:
    """Whether a file holds the weights of the published FID; a distance on others is none."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest().startswith(FID_WEIGHTS)
