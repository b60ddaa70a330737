"""Encoders and classes that Atoll knows, how one is loaded, and what names its weights. Imports no torch.

Classes outside these tuples are never loaded: Atoll runs the code of no folder or hub.
"""

import logging
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from atoll.base.config import Config
from atoll.base.errors import AtollError, ConfigError, first_line
from atoll.base.hashing import digest_tensors

if TYPE_CHECKING:  # settings and cards know encoders by name, and are read without torch
    from torch import nn

JOIN = " + "
"""Between the names of several text encoders whose states are joined."""
MOST_LAYERS = 1000
AUTOENCODERS = ("AutoencoderDC", "AutoencoderKL", "AutoencoderTiny")
"""Of diffusers."""
EXTRACTORS = ("inception", "efficientnet-lite0", "efficientnet-lite2", "pixels")
"""Vision networks with a name of their own; others are folders or hub names of DINOv2 and CLIP models."""
TOWERS = {
    "bert": "BertModel",
    "clip": "CLIPTextModel",
    "clip_text_model": "CLIPTextModel",
    "distilbert": "DistilBertModel",
    "gemma": "GemmaModel",
    "gemma2": "Gemma2Model",
    "mpnet": "MPNetModel",
    "mt5": "MT5EncoderModel",
    "qwen2": "Qwen2Model",
    "roberta": "RobertaModel",
    "siglip": "SiglipTextModel",
    "t5": "T5EncoderModel",
    "umt5": "UMT5EncoderModel",
    "xlm-roberta": "XLMRobertaModel",
}
"""Class of the text tower in transformers by the `model_type` of its config."""
PROJECTED = "CLIPTextModelWithProjection"
"""That of CLIP's where the config names it."""
# Versions of transformers call the same tokenizer by different names.
_TOKENIZED = "Bert CLIP DistilBert Gemma MPNet Qwen2 Roberta Siglip T5 XLMRoberta"
TOKENIZERS = (
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    *(f"{name}Tokenizer{speed}" for name in _TOKENIZED.split() for speed in ("", "Fast")),
)
SCHEDULERS = (
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "FlowMatchHeunDiscreteScheduler",
    "FlowMatchLCMScheduler",
    "SASolverScheduler",
    "UniPCMultistepScheduler",
)
"""Of diffusers: those that can integrate a flow."""
COMPONENTS = {
    "scheduler": ("diffusers", SCHEDULERS),
    "vae": ("diffusers", AUTOENCODERS),
    **{
        f"{kind}{number}": ("transformers", classes)
        for number in ("", "_2", "_3")
        for kind, classes in (("text_encoder", (*TOWERS.values(), PROJECTED)), ("tokenizer", TOKENIZERS))
    },
}
"""Library and classes of the parts of a pipeline that diffusers and transformers load."""
SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".txt")
"""Files that the folder of such a part may hold; neither code nor pickle is among them."""


@dataclass(frozen=True)
class KnownEncoder:
    """A published encoder. With its sizes here, `atoll plan` works without a network."""

    licence: str | None  # as its publisher states it, if it allows copies
    latent: tuple[int, int] = (0, 0)  # of an autoencoder: channels, and pixels to a side of one element
    width: int = 0  # of a text encoder: D of its states
    limit: int | None = None  # most tokens that it takes, if it has a limit
    projected: bool = False  # of CLIP: it gives states beside its vector, as SD3 reads it


_T5_WIDTHS = {"small": 512, "base": 768, "large": 1024, "xl": 2048, "xxl": 4096}
KNOWN = {
    "none": KnownEncoder(None),
    "mit-han-lab/dc-ae-f32c32-in-1.0-diffusers": KnownEncoder(None, (32, 32)),
    "stabilityai/sd-vae-ft-mse": KnownEncoder("MIT", (4, 8)),
    "stabilityai/sd-vae-ft-ema": KnownEncoder("MIT", (4, 8)),
    "stabilityai/sdxl-vae": KnownEncoder("MIT", (4, 8)),
    "madebyollin/taesd": KnownEncoder("MIT", (4, 8)),
    "madebyollin/taef1": KnownEncoder("MIT", (16, 8)),
    "madebyollin/taesd3": KnownEncoder("MIT", (16, 8)),
    "stabilityai/stable-diffusion-3.5-medium/text_encoder": KnownEncoder(None, (0, 0), 768, 77, True),
    "stabilityai/stable-diffusion-3.5-medium/text_encoder_2": KnownEncoder(None, (0, 0), 1280, 77, True),
    "stabilityai/stable-diffusion-3.5-medium/text_encoder_3": KnownEncoder(None, width=4096),
    "minilm": KnownEncoder("Apache-2.0", width=384),
    "openai/clip-vit-base-patch32": KnownEncoder("MIT", width=512, limit=77),
    "openai/clip-vit-large-patch14": KnownEncoder("MIT", width=768, limit=77),
    **{
        f"google/{family}-{size}": KnownEncoder("Apache-2.0", width=width)
        for family in ("t5-v1_1", "flan-t5")
        for size, width in _T5_WIDTHS.items()
    },
}
"""Encoders that a card may name without a question; any other name is a stranger's choice."""


def licence_of(name: str) -> str | None:
    """Licence of an encoder that allows copies; None where it is unknown or does not."""
    return KNOWN[name].licence if name in KNOWN else None


def text_parts(producer: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Who made text states, by the part of a pipeline that it is: `text_encoder`, `text_encoder_2`, ..."""
    parts = [] if producer is None else producer.get("parts") or [producer]
    return {f"text_encoder{f'_{n + 1}' if n else ''}": part for n, part in enumerate(parts)}


def with_tokenizers(parts: Iterable[str]) -> list[str]:
    """The names of text encoders in a pipeline, each before that of its tokenizer."""
    return [name for part in parts for name in (part, part.replace("text_encoder", "tokenizer"))]


def check_known(name: str, allowed: Collection[str]) -> None:
    """Refuse to load an encoder that only a card names, and that is not `allowed` by the user either."""
    # A card comes from a stranger: it must not choose what is fetched and run here.
    known = {*KNOWN, *(part for names in allowed for part in names.split(JOIN))}
    unknown = [one for one in name.split(JOIN) if one not in known]
    if unknown:
        fix = f"if you trust it, load the model with encoders={unknown}, or export it with --encoders copy"
        raise ConfigError(f"the model names the encoder {unknown[0]!r}, which Atoll does not know", fix)


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Refuse a config of transformers that wants endless layers, or attention by code other than torch's."""
    for key, value in config.items():
        if isinstance(value, int) and value > (MOST_LAYERS if "layer" in key else 10**7):
            raise ConfigError(f"{where} says that {key} is {value:,}", "mend it, or fetch it again")
        if "attn_implementation" in key:
            for wanted in value.values() if isinstance(value, dict) else [value]:
                if wanted not in (None, "eager", "sdpa"):
                    what = f"{where} wants attention by {str(wanted)[:100]!r}"
                    raise ConfigError(what, "take eager or sdpa")
        elif isinstance(value, dict):
            check_config(value, where)


# A constant beyond this is a slip or an attack, and would only show as NaN in every picture.
Constant = Annotated[float, Field(ge=-(10**6), le=10**6)]


class Producer(Config, extra="allow", strict=True):
    """What made a column, as cards and columns name it; more keys may follow."""

    name: str
    hash: str


class LatentProducer(Producer):
    """What made a column of latents: `(z - shift) * scale`."""

    shift: Constant = 0.0
    scale: Constant = 1.0


class TextProducer(Producer):
    """What made a column of text states."""

    max_length: Annotated[int, Field(ge=0, le=10**6)]
    pooled: Annotated[int, Field(ge=0, le=65536)] | None = None
    parts: Annotated[list[Producer], Field(min_length=2, max_length=3)] | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        names = [part.name for part in self.parts or ()]
        if names != (self.name.split(JOIN) if JOIN in self.name else []) or bool(names) != bool(self.pooled):
            raise ValueError("parts are not those that name and pooled say")
        return self


@contextmanager
def loading(
    kind: str, name: str, fix: str = "give a folder, or a hub name that can be reached"
) -> Iterator[None]:
    """Turn a failure of a library to load the `kind` of this name into one line (`ConfigError`)."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    # The hub warns at each retry, which would bury the one line that says why.
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # diffusers passes the hub an option that the hub has dropped.
            warnings.filterwarnings("ignore", message=".*local_dir_use_symlinks", category=UserWarning)
            yield
    except AtollError:
        raise
    except Exception as error:  # of a folder from outside, libraries raise what their own code raises
        reason = first_line(error).rstrip(".: ")
        raise ConfigError(f"cannot load the {kind} {name!r}: {reason}", fix) from None
    finally:
        logger.setLevel(level)


@contextmanager
def without_reports() -> Iterator[None]:
    """Load without the report of transformers on weights that do not fit: a stranger's names are in it."""
    from transformers.utils import logging as reports

    level = reports.get_verbosity()
    reports.set_verbosity_error()
    try:
        yield
    finally:
        reports.set_verbosity(level)


def weights_hash(network: "nn.Module") -> str:
    """Digest of all parameters and buffers, so that what one network made is never taken for another's."""
    import torch

    # In float32: versions of transformers load one file in different types.
    return digest_tensors(network.state_dict(), torch.float32)


def rounded_hashes(network: "nn.Module") -> Mapping[str, str]:
    """Digests of the weights as saved in 16 bits, by the type of the numbers."""
    import torch

    state = network.state_dict()
    return {name: digest_tensors(state, getattr(torch, name)) for name in ("float16", "bfloat16")}


def is_that_of(network: "nn.Module", producer: Mapping[str, Any]) -> bool:
    """Whether it is the network that a producer names, or a copy of it that was saved in 16 bits."""
    if weights_hash(network) == producer["hash"]:
        return True
    rounded = producer.get("rounded") or {}
    return any(rounded.get(kind) == value for kind, value in rounded_hashes(network).items())
