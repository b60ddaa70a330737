"""Tiny checkpoints of the real classes, in the folders that their publishers write: no download is needed."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers
from PIL import Image

from helpers_data import saved
from helpers_export import small_vae
from helpers_networks import random_weights

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CLIP_WORDS = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
T5_WORDS = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((word, -3.0) for word in LETTERS)]
CAPTIONS = ["a red square", "a green bar", "two blue circles", "one tall house by a lake", "a dot"]
SIZE = 16
"""Of the pictures, in pixels; a latent has half of it."""
T5_WIDTH = 24


def _clip(folder: Path, number: str, kind: type, width: int) -> None:
    """CLIP's text tower, which ends at 77 tokens; G's tokenizer pads with another token than L's."""
    torch.manual_seed(width)
    sizes = {"hidden_size": width, "projection_dim": width, "intermediate_size": 16, "num_hidden_layers": 3}
    tokens = {"vocab_size": len(CLIP_WORDS), "bos_token_id": 52, "eos_token_id": 53, "pad_token_id": 53}
    config = transformers.CLIPTextConfig(num_attention_heads=2, **sizes, **tokens)
    random_weights(kind(config), width).save_pretrained(folder / f"text_encoder{number}")  # type: ignore[operator]
    words = {word: place for place, word in enumerate(CLIP_WORDS)}
    pad = {"pad_token": "z"} if number == "_2" else {}
    transformers.CLIPTokenizer(vocab=words, merges=[], model_max_length=77, **pad).save_pretrained(
        folder / f"tokenizer{number}"
    )


def _t5(folder: Path, number: str) -> None:
    torch.manual_seed(1)
    sizes = {"d_model": T5_WIDTH, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=len(T5_WORDS), feed_forward_proj="gated-gelu", **sizes)
    transformers.T5EncoderModel(config).save_pretrained(folder / f"text_encoder{number}")
    transformers.T5Tokenizer(vocab=T5_WORDS, extra_ids=0).save_pretrained(folder / f"tokenizer{number}")


def _save(folder: Path, pipeline: str, network: Any, scheduler: Any, std: float = 0.1) -> Path:
    random_weights(network, 3, std).save_pretrained(folder / "transformer")  # type: ignore[operator]
    scheduler.save_pretrained(folder / "scheduler")
    index: dict[str, Any] = {"_class_name": pipeline, "_diffusers_version": diffusers.__version__}
    for part in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        name = "config.json" if (folder / part / "config.json").exists() else "tokenizer_config.json"
        file = folder / part / ("scheduler_config.json" if part == "scheduler" else name)
        config = json.loads(file.read_text())
        kind = config.get("_class_name") or config.get("tokenizer_class") or config["architectures"][0]
        index[part] = ["diffusers" if "_class_name" in config else "transformers", kind]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def _vae(folder: Path, **changes: Any) -> None:
    small_vae(folder / "vae", **changes)


BLOCKS = {"down": "DownEncoder", "up": "UpDecoder"}
ALPHA = {"latent_channels": 4, "scaling_factor": 0.18215, "shift_factor": None}
JOINT = {"latent_channels": 16, "scaling_factor": 1.5305, "shift_factor": 0.0609}
SHAPE = {"num_attention_heads": 2, "attention_head_dim": 8}


def dit(folder: Path) -> Path:
    """facebook/DiT-XL-2-256: 1,000 labels and the null one, eps with a variance."""
    _vae(folder, **ALPHA)
    network = diffusers.DiTTransformer2DModel(
        **SHAPE, in_channels=4, out_channels=8, num_layers=2, sample_size=SIZE // 2, patch_size=2
    )
    return _save(folder, "DiTPipeline", network, diffusers.DDIMScheduler(clip_sample=False))


def pixart(folder: Path, pipeline: str = "PixArtAlphaPipeline", **changes: Any) -> Path:
    """PixArt-alpha/PixArt-XL-2-512x512: one T5, eps with a variance."""
    _vae(folder, **{**ALPHA, **({"scaling_factor": 0.13025} if "Sigma" in pipeline else {})})
    _t5(folder, "")
    settings = {**SHAPE, "in_channels": 4, "out_channels": 8, "num_layers": 2, "sample_size": SIZE // 2}
    settings |= {"cross_attention_dim": 16, "caption_channels": T5_WIDTH, "patch_size": 2}
    network = diffusers.PixArtTransformer2DModel(**{**settings, **changes})
    return _save(folder, pipeline, network, diffusers.DPMSolverMultistepScheduler())


def sigma(folder: Path) -> Path:
    """PixArt-alpha/PixArt-Sigma-XL-2-1024-MS: SDXL's autoencoder, positions at half of the distance."""
    return pixart(folder, "PixArtSigmaPipeline", interpolation_scale=2, use_additional_conditions=False)


def alpha(folder: Path) -> Path:
    """PixArt-alpha/PixArt-XL-2-1024-MS: told of sizes and aspects, with positions at half of the distance."""
    made = pixart(
        folder, sample_size=128, interpolation_scale=2, num_attention_heads=3, cross_attention_dim=24
    )
    blocks = {f"{way}_block_types": (f"{kind}Block2D",) * 4 for way, kind in BLOCKS.items()}
    _vae(folder, **ALPHA, **blocks, block_out_channels=(8,) * 4)  # of factor 8, as the embedding of sizes is
    return made


def sd3(folder: Path) -> Path:
    """stabilityai/stable-diffusion-3.5-medium: three encoders, and blocks with a second attention."""
    _vae(folder, **JOINT)
    _clip(folder, "", transformers.CLIPTextModelWithProjection, 8)
    _clip(folder, "_2", transformers.CLIPTextModelWithProjection, 12)
    _t5(folder, "_3")
    settings: dict[str, Any] = {**SHAPE, "in_channels": 16, "out_channels": 16, "num_layers": 3}
    settings |= {"joint_attention_dim": T5_WIDTH, "caption_projection_dim": 16, "pooled_projection_dim": 20}
    settings |= {"sample_size": SIZE // 2, "pos_embed_max_size": 6, "qk_norm": "rms_norm"}
    network = diffusers.SD3Transformer2DModel(**settings, dual_attention_layers=(0,))
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return _save(folder, "StableDiffusion3Pipeline", network, scheduler, 0.3)


def flux(folder: Path, guidance: bool = True) -> Path:
    """black-forest-labs/FLUX.1-dev, or without guidance FLUX.1-schnell: CLIP's pooled vector, T5's tokens."""
    _vae(folder, **JOINT)
    _clip(folder, "", transformers.CLIPTextModel, 8)
    _t5(folder, "_2")
    settings = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 64, "num_layers": 1}
    settings |= {"num_single_layers": 2, "joint_attention_dim": T5_WIDTH, "pooled_projection_dim": 8}
    network = diffusers.FluxTransformer2DModel(**settings, guidance_embeds=guidance, axes_dims_rope=(4, 6, 6))
    shifts = {"use_dynamic_shifting": True, "shift": 3.0} if guidance else {}
    return _save(folder, "FluxPipeline", network, diffusers.FlowMatchEulerDiscreteScheduler(**shifts), 0.3)


def schnell(folder: Path) -> Path:
    """black-forest-labs/FLUX.1-schnell."""
    return flux(folder, guidance=False)


MADE: dict[str, Callable[[Path], Path]] = {one.__name__: one for one in (dit, pixart, alpha, sigma, sd3)}
MADE |= {"dev": flux, "schnell": schnell}


def pictures(path: Path, rows: int = 24, wide: bool = False) -> Path:
    """A parquet file of captioned pictures with labels up to 999; every other one may be twice as wide."""
    source, table = np.random.default_rng(0), dict[str, list[Any]](image=[], text=[], label=[])
    for row in range(rows):
        pixels = source.integers(0, 255, (SIZE, SIZE * (1 + (wide and row % 2)), 3), dtype=np.uint8)
        table["image"].append(saved(Image.fromarray(pixels)))
        table["text"].append(CAPTIONS[row % len(CAPTIONS)])
        table["label"].append(999 if row < 4 else row)
    pq.write_table(pa.table(table), path)
    return path


@contextmanager
def loaded(folder: Path) -> Iterator[Any]:
    """diffusers' own pipeline of a folder, without its progress bar."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(str(folder), low_cpu_mem_usage=False)
    pipe.set_progress_bar_config(disable=True)
    yield pipe
