"""Vision encoders: EfficientNet-Lite is the real one; DINOv2 is tiny and random."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from atoll.base.errors import ConfigError
from atoll.encoders.vision import VisionEncoder, akin, vision_encoder
from helpers_extractors import save_dinov2


def pictures(count: int = 5, size: int = 40) -> list[Image.Image]:
    draws = np.random.default_rng(0)
    return [Image.fromarray(draws.integers(0, 255, (size, size, 3), dtype=np.uint8)) for _ in range(count)]


@pytest.fixture(scope="module")
def dinov2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_dinov2(tmp_path_factory.mktemp("dinov2"))


@pytest.fixture(scope="module", params=["efficientnet-lite0", "efficientnet-lite2", "dinov2"])
def encoder(request: pytest.FixtureRequest) -> VisionEncoder:
    if request.param == "dinov2":
        return vision_encoder(str(request.getfixturevalue("dinov2")), 28)
    return vision_encoder(request.param)


def test_one_vector_for_each_picture(encoder: VisionEncoder) -> None:
    features = encoder.encode(pictures())
    assert features.shape == (5, encoder.width) and features.dtype == torch.float32
    assert torch.isfinite(features).all()
    assert float(features.std(0).max()) > 1e-3
    assert encoder.encode([]).shape == (0, encoder.width)


def test_a_picture_does_not_see_its_batch(encoder: VisionEncoder) -> None:
    together = encoder.encode(pictures())
    assert torch.equal(encoder.encode(pictures()), together)
    torch.testing.assert_close(encoder.encode(pictures(), batch=2), together, rtol=1e-4, atol=1e-5)


def test_the_size_is_part_of_what_made_the_features() -> None:
    small, large = vision_encoder("efficientnet-lite0", 32), vision_encoder("efficientnet-lite0", 64)
    assert small.producer() != large.producer()
    assert small.producer()["hash"] == large.producer()["hash"]


def test_lite0_knows_pictures() -> None:
    """Pretrained weights: pictures of a kind are nearer to each other than to another kind."""
    x, y = np.meshgrid(np.arange(64), np.arange(64))
    stripes = [np.sin((x + s) / 3) for s in range(4)]
    discs = [(((x - 32) ** 2 + (y - 32) ** 2) < (r + 12) ** 2) * 2.0 - 1 for r in range(4)]
    images = [Image.fromarray(((v + 1) * 127).astype(np.uint8)) for v in stripes + discs]
    features = torch.nn.functional.normalize(vision_encoder("efficientnet-lite0").encode(images))
    alike = features @ features.T
    assert alike[:4, :4].min() > alike[:4, 4:].max() and alike[4:, 4:].min() > alike[:4, 4:].max()


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("efficientnet-lite1", "did you mean 'efficientnet-lite"),
        ("dino", "unknown vision encoder 'dino'"),
        ("facebook/dinov2-base", "cannot load the vision encoder"),
        ("/nowhere/at/all", "cannot load the vision encoder"),
    ],
)
def test_an_encoder_that_is_not_there(name: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        vision_encoder(name)
    assert "\n" not in str(caught.value)


def test_a_network_of_another_kind_is_refused(tmp_path: Path) -> None:
    config = transformers.CLIPTextConfig(
        vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.CLIPTextModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is no DINOv2"):
        vision_encoder(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "other", "expected"),
    [
        ("efficientnet-lite0", "efficientnet-lite2", True),
        ("facebook/dinov2-base", "facebook/dinov2-with-registers-large", True),
        ("facebook/dinov2-base", "facebook/dino-vitb16", False),
        ("facebook/dinov2-base", "inception", False),
        ("", "efficientnet-lite2", False),
    ],
)
def test_networks_of_one_family_are_akin(name: str, other: str, expected: bool) -> None:
    assert akin(name, other) is expected
