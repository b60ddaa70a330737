"""Pipelines of real networks at tiny size, with cards that are true, and tiny encoders."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from diffusers import AutoencoderKL
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from safetensors.torch import save
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from atoll.base.hashing import digest, sha256
from atoll.data.encode import origin
from atoll.encoders.text import text_encoder
from atoll.encoders.vae import autoencoder
from atoll.export.bank import ExpertBank
from atoll.export.pipeline import AtollPipeline
from atoll.model.card import Card
from atoll.model.expert import Expert, settings_of
from atoll.networks.settings import DataShape
from helpers_networks import card, denoiser, router

LABELS = DataShape(channels=3, size=8, classes=4)
NOTHING = DataShape(channels=3, size=8)
WORDS = ["<pad>", "</s>", "<s>", "<unk>", "a", "red", "green", "square", "bar", "one", "two"]
LENGTH = 8


def save_tokenizer(folder: Path, start: bool, words: Sequence[str] = WORDS) -> None:
    """A tokenizer of a few words that ends (and starts) a text as T5's (and CLIP's) does."""
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>" if start else "$A </s>", special_tokens=[("<s>", 2), ("</s>", 1)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", bos_token="<s>"
    ).save_pretrained(folder)


def text_tower(folder: Path) -> Path:
    """A T5 encoder of sixteen numbers a token, and its tokenizer."""
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=len(WORDS), decoder_start_token_id=0, **sizes)
    transformers.T5EncoderModel(config).save_pretrained(folder)
    save_tokenizer(folder, start=False)
    return folder


def small_vae(folder: Path, **changes: Any) -> Path:
    """An AutoencoderKL of 4 channels and factor 2."""
    torch.manual_seed(0)
    settings: dict[str, Any] = {"down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 4}
    settings |= {"up_block_types": ("UpDecoderBlock2D",) * 2, "block_out_channels": (8, 8)}
    settings |= {"norm_num_groups": 4, "scaling_factor": 0.3611, "shift_factor": 0.1159}
    AutoencoderKL(**{**settings, **changes}).save_pretrained(folder)
    return folder


def facts(network: torch.nn.Module, shape: DataShape, role: str, island: int | None, **changes: Any) -> Card:
    """A card that is true of a network."""
    name = "pixart" if shape.text_width else "dit"
    content = {
        "role": role,
        "island": island,
        "family": "router" if role == "router" else name,
        "condition": "text" if shape.text_width else "class" if shape.classes else "none",
        "shape": vars(shape),
        "weights_sha256": sha256(save(dict(network.state_dict()), metadata={"format": "pt"})),
        "config_sha256": digest(settings_of(network)),
        "parameters": sum(p.numel() for p in network.parameters()),
        "provenance": {"atoll": "0.1.0", "init": {"kind": "scratch"}},
    }
    return card(**{**content, **changes})


def expert(number: int, shape: DataShape, seed: int | None = None, **changes: Any) -> Expert:
    """An expert for one place, with its card."""
    network = denoiser(100 + number if seed is None else seed, shape)
    told = facts(network, shape, **{"role": "expert", "island": number, **changes})
    return Expert(network, told.family, told.prediction, told.schedule, told)


def expert_of(name: str, number: int, shape: DataShape, **changes: Any) -> Expert:
    """An expert of the named family."""
    network = denoiser(200 + number, shape, name=name)
    told = facts(network, shape, "expert", number, **{"family": name, **changes})
    return Expert(network, name, told.prediction, told.schedule, told)


def pipeline(
    shape: DataShape = LABELS, k: int = 3, numbers: tuple[int, ...] = (), **changes: Any
) -> AtollPipeline:
    """A pipeline without encoders: latents are pixels, conditions labels or nothing."""
    network = router(7, k, shape)
    network.card = facts(network, shape, "router", None, **changes)
    bank = ExpertBank({n: expert(n, shape, **changes) for n in numbers or range(k)}, k)
    made = AtollPipeline(bank, network, FlowMatchEulerDiscreteScheduler(), num_inference_steps=4)
    made.set_progress_bar_config(disable=True)
    return made


def text_pipeline(folder: Path, k: int = 2) -> AtollPipeline:
    """One with text and a VAE, which lie in `folder` as `text` and `vae`."""
    text = text_encoder(str(text_tower(folder / "text")), LENGTH)
    vae = autoencoder(str(small_vae(folder / "vae")))
    shape = DataShape(channels=4, size=8, text_width=16, text_length=LENGTH)
    made = {"text": origin(text), "latents": origin(vae)}
    network = router(7, k, shape)
    network.card = facts(network, shape, "router", None, **made)
    bank = ExpertBank({n: expert(n, shape, **made) for n in range(k)}, k)
    encoders = vae.network, text.towers[0].network, text.towers[0].tokenizer
    pipe = AtollPipeline(bank, network, FlowMatchEulerDiscreteScheduler(), *encoders, num_inference_steps=3)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load(folder: Path, **options: Any) -> AtollPipeline:
    """The pipeline of a folder, without a progress bar."""
    pipe = AtollPipeline.from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generators(count: int, first: int = 0) -> list[torch.Generator]:
    """A generator for each picture."""
    return [torch.Generator().manual_seed(first + number) for number in range(count)]


def state(pipe: AtollPipeline) -> dict[str, torch.Tensor]:
    """Every number of experts and router."""
    parts = {"experts": pipe.experts, "router": pipe.router}
    return {
        f"{name}.{key}": value for name, part in parts.items() for key, value in part.state_dict().items()
    }
