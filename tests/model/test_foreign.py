"""Published checkpoints: what is found, what of it fits, and what is refused."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from atoll.base.errors import ConfigError
from atoll.model.card import WEIGHTS
from atoll.model.foreign import INDEX, find, take_over
from atoll.networks.families import family
from atoll.networks.settings import DataShape, NetworkConfig
from helpers_networks import CLASSES, TEXT, TINY, denoiser


def saved(folder: Path, network: torch.nn.Module, **options: Any) -> Path:
    """A checkpoint as diffusers writes it."""
    cast(Any, network).save_pretrained(folder, **options)
    return folder


def tensors(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize("shape", [TEXT, CLASSES], ids=["pixart", "dit"])
@pytest.mark.parametrize("layout", ["folder", "relative", "pipeline", "sharded"])
def test_every_layout_gives_the_same_bits(layout: str, shape: DataShape, tmp_path: Path) -> None:
    wanted, network = denoiser(1, shape), denoiser(2, shape)
    inside = tmp_path / "c" / ("transformer" if layout == "pipeline" else "")
    saved(inside, wanted, **({"max_shard_size": "10KB"} if layout == "sharded" else {}))
    if layout == "pipeline":
        (tmp_path / "c" / "model_index.json").write_text("{}")
    assert (inside / INDEX).exists() == (layout == "sharded")
    found = find("c" if layout == "relative" else str(tmp_path / "c"), tmp_path)
    assert found.class_name == type(wanted).__name__
    fit = take_over(network, found.weights(), "c")
    assert not fit.drawn and not fit.unused and fit.share == 1.0
    assert all(torch.equal(value, tensors(wanted)[name]) for name, value in tensors(network).items())
    assert fit.lines("c") == [
        f"initial weights from c: {len(fit.kept)} of {len(fit.kept)} tensors, 100.0% of the numbers"
    ]


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    half = denoiser(1).to(torch.bfloat16)
    network = denoiser(2)
    take_over(network, find(str(saved(tmp_path, half)), tmp_path).weights(), "c")
    for name, value in tensors(network).items():
        assert value.dtype == torch.float32 and torch.equal(value, tensors(half)[name].float())


def test_other_classes_another_patch_and_another_depth_are_named() -> None:
    """20 classes there and 4 here, patch 2 there and 4 here, two blocks there and three here."""
    arguments = {**TINY, "family": "dit"}
    there = family("dit").build(
        NetworkConfig.parse({**arguments, "patch": 2, "depth": 2}, "a test"), DataShape(3, 8, classes=20)
    )
    here = denoiser(3, CLASSES, depth=1)
    before = {name: value.clone() for name, value in tensors(here).items()}
    fit = take_over(here, tensors(there), "'c'")
    table = "transformer_blocks.0.norm1.emb.class_embedder.embedding_table.weight"
    assert fit.drawn[table] == "21x16 there, 5x16 here"
    assert set(fit.drawn) == {table, "pos_embed.proj.weight", "proj_out_2.weight", "proj_out_2.bias"}
    assert fit.unused and all(name.startswith("transformer_blocks.1.") for name in fit.unused)
    for name, value in tensors(here).items():
        assert torch.equal(value, before[name] if name in fit.drawn else tensors(there)[name])
    total = sum(value.numel() for value in before.values())
    assert fit.share == pytest.approx(1 - sum(before[name].numel() for name in fit.drawn) / total)
    first, drawn, unused = fit.lines("'c'")
    assert first.startswith(f"initial weights from 'c': {len(fit.kept)} of {len(before)} tensors, ")
    assert drawn.startswith("  warning: 4 are drawn instead: ") and drawn.endswith(" and 1 more")
    assert f"{len(fit.unused)} of its tensors have no place: transformer_blocks.1." in unused


def test_a_checkpoint_of_which_nothing_fits_is_refused() -> None:
    message = r"none of the 2 tensors of 'c' fits the network: .* and \d+ more: give"
    with pytest.raises(ConfigError, match=message):
        take_over(denoiser(1), {"a": torch.zeros(2), "proj_out.bias": torch.zeros(1)}, "'c'")


def test_numbers_that_are_not_finite_are_refused() -> None:
    network = denoiser(1)
    weights = tensors(network)
    weights["proj_out.bias"] = torch.full_like(weights["proj_out.bias"], torch.nan)
    with pytest.raises(ConfigError, match=r"proj_out\.bias of 'c' holds numbers that are not finite"):
        take_over(network, weights, "'c'")


def test_the_class_that_dit_and_pixart_once_shared_is_known(tmp_path: Path) -> None:
    saved(tmp_path, denoiser(1, CLASSES))
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"_class_name": "Transformer2DModel", "norm_type": "ada_norm_zero"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find(str(tmp_path), tmp_path).class_name == "DiTTransformer2DModel"


def index(**places: str) -> bytes:
    return json.dumps({"weight_map": places}).encode()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": None}, "it has no config.json"),
        ({"config.json": b"{"}, "config.json cannot be read"),
        ({"config.json": b"[]"}, "config.json holds no settings"),
        ({WEIGHTS: None}, f"it has no {WEIGHTS}: give a folder"),
        ({WEIGHTS: None, "pytorch.bin": b"x"}, "pytorch.bin is pickle, which is not read"),
        ({WEIGHTS: b"torn"}, f"{WEIGHTS} cannot be read"),
        ({WEIGHTS: None, INDEX: b"{}"}, "names no safetensors beside it"),
        ({WEIGHTS: None, INDEX: index(a="../secret.safetensors")}, "names no safetensors beside it"),
        ({WEIGHTS: None, INDEX: index(a="weights.bin")}, "names no safetensors beside it"),
        ({WEIGHTS: None, INDEX: index(a="a.safetensors")}, "a.safetensors is missing"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    files: dict[str, bytes | None], words: str, tmp_path: Path
) -> None:
    saved(tmp_path, denoiser(1))
    for name, data in files.items():
        (tmp_path / name).unlink(missing_ok=True)
        if data is not None:
            (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=r"cannot be used: ") as caught:
        find(str(tmp_path), tmp_path).weights()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_and_a_hub_without_network(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*/nowhere: give a folder"):
        find("./nowhere", tmp_path)
    message = r"'owner/nowhere' is no folder, and as a hub name it cannot be had"
    with pytest.raises(ConfigError, match=message) as caught:
        find("owner/nowhere", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_hub_name_is_read_from_the_hubs_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache laid out as the hub's client does it, with the network switched off."""
    cache = tmp_path / "models--owner--model"
    wanted, network = denoiser(1), denoiser(2)
    saved(cache / "snapshots" / ("0" * 40) / "transformer", wanted)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    take_over(network, find("owner/model", tmp_path).weights(), "c")
    assert all(torch.equal(value, tensors(wanted)[name]) for name, value in tensors(network).items())
