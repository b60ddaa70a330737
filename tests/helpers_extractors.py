"""Extractors with random weights that take milliseconds, and folders of pictures to judge."""

from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

WORDS = ["<pad>", "</s>", "<s>", "<unk>", "a", "red", "house", "square"]


def save_dinov2(folder: Path, seed: int = 0) -> Path:
    """A DINOv2 of 16 dimensions that sees 28 px."""
    torch.manual_seed(seed)
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    transformers.Dinov2Model(config).save_pretrained(folder)
    return folder


def save_clip(folder: Path, tokenizer: bool = True) -> Path:
    """A CLIP of 8 dimensions that sees 28 px and knows four words."""
    torch.manual_seed(0)
    size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokens = {"vocab_size": len(WORDS), "max_position_embeddings": 9}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    config = transformers.CLIPConfig(
        text_config={**size, **tokens, **ends},
        vision_config={**size, "image_size": 28, "patch_size": 14},
        projection_dim=8,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    if tokenizer:
        from helpers_export import save_tokenizer  # it imports the package

        save_tokenizer(folder, start=True, words=WORDS)
    return folder


def save_pictures(folder: Path, count: int, seed: int = 0, size: int = 12) -> Path:
    """Pictures of noise with a tint."""
    folder.mkdir(parents=True, exist_ok=True)
    draws = np.random.default_rng(seed)
    for number in range(count):
        pixels = draws.integers(0, 200, (size, size, 3)) + draws.integers(0, 55, 3)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:03d}.png")
    return folder
