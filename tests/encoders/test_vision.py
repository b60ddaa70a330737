"""Networks that cluster and judge: EfficientNet-Lite is the real one; DINOv2 and CLIP are tiny and random."""

import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from atoll.base.errors import ConfigError
from atoll.encoders import vision
from atoll.encoders.vision import ClipEncoder, VisionEncoder, akin, extractor, vision_encoder
from helpers_extractors import save_clip, save_dinov2, save_pictures


def processor_of(name: str) -> Any:
    """The class that reads pictures by Pillow, which transformers 4 calls otherwise."""
    return getattr(transformers, f"{name}ImageProcessorPil", getattr(transformers, f"{name}ImageProcessor"))


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
    ("load", "name", "size", "words"),
    [
        (vision_encoder, "efficientnet-lite1", None, "did you mean 'efficientnet-lite"),
        (vision_encoder, "dino", None, "unknown vision encoder 'dino'"),
        (vision_encoder, "facebook/dinov2-base", None, "cannot load the vision encoder"),
        (vision_encoder, "/nowhere/at/all", None, "cannot load the vision encoder"),
        (extractor, "inceptoin", None, "did you mean 'inception'"),
        (extractor, "facebook/dinov2-base", None, "cannot load the extractor"),
        (extractor, "/nowhere/at/all", None, "cannot load the extractor"),
        (extractor, "inception", 64, "Inception sees pictures of 299 px, not 64"),
    ],
)
def test_what_is_not_there(load: Callable[..., Any], name: str, size: int | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(name, size)
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


# Judges.


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> ClipEncoder:
    found = extractor(str(save_clip(tmp_path_factory.mktemp("clip"))))
    assert isinstance(found, ClipEncoder)
    return found


def test_clip_gives_what_transformers_gives(clip: ClipEncoder) -> None:
    """Pixels through CLIP's own processor, then both towers as the whole model runs them."""
    images = pictures(3, 28)
    processor = processor_of("CLIP")(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    pixels = processor(images, return_tensors="pt")["pixel_values"]
    tokens = clip.tokenizer(["a red house", "square"], padding=True, return_tensors="pt")
    whole = clip.network(
        pixel_values=pixels, input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
    )
    features, texts = clip.encode(images), clip.texts(["a red house", "square"])
    assert features.shape == (3, 8) and texts.shape == (2, 8)
    unit = torch.nn.functional.normalize
    torch.testing.assert_close(unit(features), whole.image_embeds, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(unit(texts), whole.text_embeds, rtol=1e-4, atol=1e-5)


def test_clip_knows_its_size_and_whether_it_reads(clip: ClipEncoder, tmp_path: Path) -> None:
    assert (clip.size, clip.width, clip.kind, clip.resize) == (28, 8, "clip", "bicubic")
    with pytest.raises(ConfigError, match="sees pictures of 28 px, not 64"):
        extractor(clip.name, 64)
    bare = extractor(str(save_clip(tmp_path, tokenizer=False)))
    assert isinstance(bare, ClipEncoder) and bare.encode(pictures(3, 28)).shape == (3, 8)
    with pytest.raises(ConfigError, match="has no tokenizer"):
        bare.texts(["a"])


def test_a_dinov2_judges_by_its_class_token_and_clusters_by_its_patches(dinov2: Path) -> None:
    name = str(dinov2)
    one, other = extractor(name, 28), vision_encoder(name, 28)
    assert one.kind == "dinov2" and one.producer() == {**other.producer(), "token": "class"}
    own = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}  # of the hub's models
    processor = processor_of("Bit")(do_resize=False, do_center_crop=False, **own)
    states = one.network(**processor(pictures(3, 28), return_tensors="pt")).last_hidden_state
    torch.testing.assert_close(one.encode(pictures(3, 28)), states[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other.encode(pictures(3, 28)), states[:, 1:].mean(1), rtol=1e-4, atol=1e-5)


def test_other_weights_of_inception_are_told_by_their_file(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "own.pth").write_bytes(b"own")
    assert not vision.is_published(tmp_path / "own.pth")
    monkeypatch.setattr(vision, "FID_WEIGHTS", hashlib.sha256(b"own").hexdigest()[:8])
    assert vision.is_published(tmp_path / "own.pth")


def test_an_efficientnet_is_one_and_the_same() -> None:
    one, other = extractor("efficientnet-lite0"), vision_encoder("efficientnet-lite0")
    assert one.producer() == other.producer()
    assert torch.equal(one.encode(pictures(3, 28)), other.encode(pictures(3, 28)))


# Inception.

FIDELITY = importlib.util.find_spec("torch_fidelity") is not None


@pytest.mark.skipif(FIDELITY, reason="torch-fidelity is installed")
def test_inception_without_its_package_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"not installed .*pip install -e '.\[fid\]' in the checkout"):
        extractor("inception")


@pytest.mark.skipif(not FIDELITY, reason="no torch-fidelity: pip install -e '.[fid]'")
def test_inception_agrees_with_torch_fidelity(tmp_path: Path) -> None:
    """The same distance as the whole program of torch-fidelity finds on the same files."""
    import torch_fidelity

    from atoll.measure.metrics.frechet import frechet_of_moments
    from atoll.measure.metrics.projection import Moments

    try:
        inception = extractor("inception")
    except ConfigError as error:
        pytest.skip(f"the weights of Inception cannot be had: {error}")
    folders = [save_pictures(tmp_path / str(seed), 20, seed, 40) for seed in range(2)]
    moments = []
    for folder in folders:
        images = [Image.open(path) for path in sorted(folder.glob("*.png"))]
        moments.append(Moments.of(inception.encode(images).numpy()))
    theirs = torch_fidelity.calculate_metrics(
        input1=str(folders[0]), input2=str(folders[1]), fid=True, cuda=False, verbose=False
    )
    (one, other) = moments
    ours = frechet_of_moments(one.mean, one.covariance, other.mean, other.covariance)
    assert ours == pytest.approx(theirs["frechet_inception_distance"], rel=1e-3)


def test_pixels_are_the_picture_itself() -> None:
    picture = Image.new("RGB", (32, 32), (255, 0, 51))
    judge = extractor("pixels")
    features = judge.encode([picture, picture.convert("L")])
    assert features.shape == (2, judge.width) == (2, 3 * 16 * 16)
    assert torch.allclose(features[0].view(3, 256), torch.tensor([[1.0], [-1.0], [-0.6]]), atol=1e-6)
    assert extractor("pixels", 4).width == 48
    assert len({extractor("pixels", side).producer()["size"] for side in (4, 16)}) == 2
