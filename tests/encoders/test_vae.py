"""Autoencoders: latents are `(z - shift) * scale` of the posterior mode, and come back."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from atoll.base.errors import ConfigError
from atoll.data.encode import origin
from atoll.encoders.vae import autoencoder, autoencoder_of
from helpers_export import small_vae


def pictures(mode: str = "RGB", count: int = 3, size: int = 16) -> list[Image.Image]:
    draws = np.random.default_rng(0)
    shape = (size, size, 3) if mode == "RGB" else (size, size)
    return [Image.fromarray(draws.integers(0, 256, shape, dtype=np.uint8)) for _ in range(count)]


@pytest.fixture(scope="module")
def kl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_vae(tmp_path_factory.mktemp("kl"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dc")
    torch.manual_seed(0)
    settings: dict[str, Any] = {"in_channels": 3, "latent_channels": 4, "attention_head_dim": 2}
    half = {"block_types": ("ResBlock", "EfficientViTBlock"), "block_out_channels": (8, 8)}
    half |= {"layers_per_block": (1, 1), "qkv_multiscales": ((), (5,))}
    settings |= {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in half.items()}
    settings |= {"upsample_block_type": "interpolate", "downsample_block_type": "stride_conv"}
    settings |= {"decoder_norm_types": "rms_norm", "decoder_act_fns": "silu", "scaling_factor": 0.41}
    diffusers.AutoencoderDC(**settings).save_pretrained(folder)
    return folder


def test_latents_are_the_shifted_and_scaled_mode(kl: Path) -> None:
    vae = autoencoder(str(kl))
    assert (vae.shift, vae.scale) == (0.1159, 0.3611)
    stacked = np.stack([np.asarray(p) for p in pictures()]).transpose(0, 3, 1, 2)
    posterior = vae.network.encode(torch.from_numpy(stacked).float() / 127.5 - 1).latent_dist  # type: ignore[union-attr,operator]
    latents = vae.encode(pictures())
    torch.testing.assert_close(latents, (posterior.mode() - 0.1159) * 0.3611, rtol=1e-5, atol=1e-6)
    assert float(posterior.std.min()) > 1e-3 and torch.equal(latents, vae.encode(pictures()))  # no draw
    assert latents.shape == (3, 4, 8, 8)


def test_a_copy_in_16_bits_is_known_again(kl: Path, tmp_path: Path) -> None:
    made = origin(autoencoder(str(kl)))
    autoencoder(str(kl)).network.to(torch.bfloat16).save_pretrained(tmp_path)  # type: ignore[union-attr]
    assert autoencoder_of(made, place=str(tmp_path)).name == str(kl)
    del made["rounded"]
    with pytest.raises(ConfigError, match="is not the one that made the latents"):
        autoencoder_of(made, place=str(tmp_path))


def test_decoding_takes_scale_and_shift_back(kl: Path) -> None:
    vae = autoencoder(str(kl))
    z = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    expected = vae.network.decode(z).sample.clamp(-1, 1)  # type: ignore[union-attr,operator]
    torch.testing.assert_close(vae.decode((z - 0.1159) * 0.3611), expected, rtol=1e-4, atol=1e-5)


def test_channels_have_their_own_mean_and_deviation(kl: Path, tmp_path: Path) -> None:
    """As StableDiffusionXLPipeline takes them: `latents * std / scaling_factor + mean` is z."""
    mean, std = [0.5, -1.0, 0.25, 0.0], [2.0, 0.5, 1.0, 4.0]
    network = diffusers.AutoencoderKL.from_pretrained(kl)
    network.register_to_config(latents_mean=mean, latents_std=std)
    network.save_pretrained(tmp_path / "vae")
    plain, vae = autoencoder(str(kl)), autoencoder(str(tmp_path / "vae"))
    assert vae.producer() == {**plain.producer(), "name": vae.name, "mean": mean, "std": std}
    centre, width = torch.tensor(mean).view(1, 4, 1, 1), torch.tensor(std).view(1, 4, 1, 1)
    z = plain.encode(pictures()) / plain.scale + plain.shift
    latents = vae.encode(pictures())
    torch.testing.assert_close(latents * width / vae.scale + centre, z, rtol=1e-4, atol=1e-5)
    expected = plain.decode(plain.encode(pictures()))
    torch.testing.assert_close(vae.decode(latents), expected, rtol=1e-3, atol=1e-4)
    assert autoencoder_of(vae.producer()).mean == tuple(mean)
    without = {key: value for key, value in vae.producer().items() if key not in ("mean", "std")}
    with pytest.raises(ConfigError, match="is not the one that made the latents"):
        autoencoder_of(without)
    network.register_to_config(latents_std=std[:3])
    network.save_pretrained(tmp_path / "vae")
    with pytest.raises(ConfigError, match="latents_mean, latents_std of the VAE"):
        autoencoder(str(tmp_path / "vae"))


@pytest.mark.parametrize(("kind", "scale"), [("kl", 0.3611), ("tiny", 1.0), ("dc", 0.41)])
def test_every_kind_encodes_and_decodes(kind: str, scale: float, request: pytest.FixtureRequest) -> None:
    vae = autoencoder(str(request.getfixturevalue(kind)))
    assert vae.scale == scale
    latents = vae.encode(pictures())
    assert latents.shape[:2] == (3, 4) and latents.dtype == torch.float32
    back = vae.decode(latents)
    assert back.shape == (3, 3, 16, 16) and float(back.abs().max()) <= 1
    assert vae.producer() == autoencoder(vae.name).producer()
    assert vae.encode(pictures("L")).shape == latents.shape  # grey pictures become RGB


def test_pixels_come_back_to_the_bit() -> None:
    vae = autoencoder("none")
    for mode, channels in (("RGB", 3), ("L", 1)):
        latents = vae.encode(pictures(mode))
        assert latents.shape == (3, channels, 16, 16) and float(latents.min()) >= -1
        pixels = ((vae.decode(latents) + 1) * 127.5).round().byte()
        expected = np.stack([np.asarray(p).reshape(16, 16, channels) for p in pictures(mode)])
        assert (pixels.permute(0, 2, 3, 1).numpy() == expected).all()
        halved = ((vae.decode(latents.half().float()) + 1) * 127.5).round().byte()
        assert torch.equal(halved, pixels)  # the column is float16
    assert vae.producer() == {"name": "none", "hash": "", "shift": 0.0, "scale": 1.0}
    assert vae.decode(torch.tensor([[[[-3.0, 3.0]]]])).flatten().tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("name", ["nowhere", "stabilityai/sd-vae-ft-mse", "./nowhere", "a/b/c"])
def test_an_autoencoder_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot load the VAE") as caught:
        autoencoder(name)
    assert repr(name) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "NoSuchThing"}')
    with pytest.raises(ConfigError, match="cannot load the VAE"):
        autoencoder(str(tmp_path))


def test_the_device_is_no_part_of_what_made_a_column(tmp_path: Path) -> None:
    """Workers with GPUs and a machine without one may make the shards of one column."""
    here = autoencoder(str(small_vae(tmp_path)))
    assert origin(replace(here, device="cuda:0")) == origin(here)
