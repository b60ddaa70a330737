"""A single model as a stock diffusers pipeline, which runs where there is no Atoll.

diffusers' pipelines of DiT and PixArt want a scheduler that scales its input, which its flow-matching ones do
not. `DPMSolverMultistepScheduler` of first order does, and on flow sigmas its step is Euler's. Those of SD3
and Flux run Euler itself, but read padding: `stock_run` has what hides it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.base.errors import ConfigError
from atoll.export.stock_run import picture_first, text_first
from atoll.model.card import Card, text_length
from atoll.networks.pipelines import CLASSES, LIMITS, Limits, check_data, limits_of

Weights = Mapping[str, Tensor]
DPM = {
    "_class_name": "DPMSolverMultistepScheduler",
    "num_train_timesteps": 1000,
    "solver_order": 1,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}


EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
WITHOUT_VAE = 8
"""Factor between pictures and latents that diffusers' pipelines assume where there is no VAE."""
DPM_REMARK = (
    "`DPMSolverMultistepScheduler` takes the place of a flow-matching scheduler, which this pipeline does not"
    " run; its step is Euler's. It rounds times to thousandths."
)
PADDING_REMARK = (
    "Padding is hidden from the network, as in training; the pipeline by itself would show it. `encode` makes"
    " it zeros, and the hook tells the attention so. The vector of a whole text, which the pipeline wants"
    " too, is zeros, as in training. Prompts that are too long are cut without an error."
)


@dataclass(frozen=True)
class Joint:
    """What a pipeline whose attention reads text and picture together is given from outside.

    Attributes:
        hide: a hook before each call of the network, which hides padding.
        attention: module and class of an attention of diffusers that knows masks; None if the network's own
            does.
    """

    hide: Callable[[Any, Any, Any], Any]
    attention: tuple[str, str] | None = None


@dataclass(frozen=True)
class Stock:
    """How diffusers' own pipeline of a family runs a model of velocities.

    Attributes:
        limits: what it demands of a model.
        scheduler: content of `scheduler_config.json`, less the time shift.
        components: the pipeline's names of VAE, text encoder and tokenizer.
        convert: config and weights as the pipeline takes them, exactly the same network.
        arguments: of a call, from the card, pixels a latent pixel (None: there is no VAE), and the campaign's
            defaults.
        remarks: what its users should know.
        empty: names of parts that it wants, and that no model here has.
        joint: set where it cannot encode texts itself.
    """

    limits: Limits
    scheduler: Mapping[str, Any]
    components: Mapping[str, str]
    convert: Callable[[dict[str, Any], Weights, Card], tuple[dict[str, Any], dict[str, Tensor]]]
    arguments: Callable[[Card, int | None, Mapping[str, Any]], dict[str, Any]]
    remarks: tuple[str, ...]
    empty: tuple[str, ...] = ()
    joint: Joint | None = None

    def shifted(self, shift: float) -> dict[str, Any]:
        """Content of `scheduler_config.json` under a time shift."""
        return {**self.scheduler, "shift" if self.scheduler is EULER else "flow_shift": shift}


def stock_of(family: str) -> Stock:
    """How a family runs; `ConfigError` if that is not known."""
    limits_of(family)
    return STOCK[family]


def check_card(card: Card, config: Mapping[str, Any], vae: Any) -> None:
    """The same once the model is trained, and of models that were trained for something else.

    Args:
        card: of the model.
        config: of its network.
        vae: the autoencoder, or None.
    """
    patch = int(config["patch_size"])
    if limits_of(card.family).patch is not None:  # the network takes whole patches for its channels
        patch = math.isqrt(config["in_channels"] // card.shape.channels)
    check_data(card.family, card.latents, card.shape.classes, patch)
    if (card.prediction, card.schedule) != ("v", "rectified-flow"):
        raise ConfigError(
            f"this {card.role} predicts {card.prediction} on {card.schedule}, a stock pipeline wants a flow",
            "export the ensemble, or a student",
        )
    if vae is not None and type(vae).__name__ not in ("AutoencoderKL", "AutoencoderTiny"):
        raise ConfigError(
            f"a stock {limits_of(card.family).pipeline} does not run {type(vae).__name__}",
            "it takes AutoencoderKL and AutoencoderTiny",
        )


def model_index(stock: Stock, transformer: str, parts: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Content of `model_index.json`.

    Args:
        stock: of the family.
        transformer: class of the network.
        parts: library and class of the other components that have a folder.
        version: of diffusers.
    """
    others = {place: list(parts.get(name, (None, None))) for name, place in stock.components.items()}
    others |= {place: [None, None] for place in stock.empty}
    return {
        "_class_name": stock.limits.pipeline,
        "_diffusers_version": version,
        "transformer": ["diffusers", transformer],
        "scheduler": ["diffusers", stock.scheduler["_class_name"]],
        **others,
    }


def _as_it_is(
    config: dict[str, Any], weights: Weights, card: Card
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return config, dict(weights)


def _all_classes(
    config: dict[str, Any], weights: Weights, card: Card
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The null label moved to where DiTPipeline looks for it; labels in between have zeros."""
    converted, null = dict(weights), int(config["num_embeds_ada_norm"])
    for name, table in weights.items():
        if name.endswith("class_embedder.embedding_table.weight"):
            moved = torch.zeros(CLASSES + 1, table.shape[1], dtype=table.dtype)
            moved[:null], moved[CLASSES] = table[:null], table[null]
            converted[name] = moved
    return {**config, "num_embeds_ada_norm": CLASSES}, converted


def _common(defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_inference_steps": defaults["num_inference_steps"],
        "guidance_scale": float(defaults["guidance_scale"]),
    }


def _of_labels(card: Card, factor: int | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if card.condition == "none":
        return {"class_labels": [CLASSES], **_common(defaults), "guidance_scale": 1.0}
    return {"class_labels": [0], **_common(defaults)}


def _of_text(card: Card, factor: int | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {
        "prompt": ["a prompt"],
        **_common(defaults),
        "max_sequence_length": text_length(card),
        "clean_caption": False,
        "use_resolution_binning": False,
    }
    return arguments if factor else {**arguments, "output_type": "latent"}


def _of_states(card: Card, factor: int | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """SD3's. Its own grid of times ends at 1/1000, so it is given another."""
    steps = int(defaults["num_inference_steps"])
    arguments = {
        "sigmas": [1 - n / steps for n in range(steps)],
        "guidance_scale": float(defaults["guidance_scale"]),
    }
    return arguments if factor else {**arguments, "output_type": "latent"}


def _of_tokens(card: Card, factor: int | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Flux's, whose guidance by two calls has a name of its own, and which knows no size."""
    side = card.shape.size * (factor or WITHOUT_VAE)
    arguments = {
        "height": side,
        "width": side,
        "num_inference_steps": int(defaults["num_inference_steps"]),
        "true_cfg_scale": float(defaults["guidance_scale"]),
    }
    return arguments if factor else {**arguments, "output_type": "latent"}


def _named(number: str = "") -> dict[str, str]:
    return {"vae": "vae", "text_encoder": f"text_encoder{number}", "tokenizer": f"tokenizer{number}"}


STOCK: dict[str, Stock] = {
    "pixart": Stock(
        LIMITS["pixart"],
        DPM,
        components=_named(),
        convert=_as_it_is,
        arguments=_of_text,
        remarks=(
            DPM_REMARK,
            "The pipeline turns prompts into lower case, and cuts them without an error.",
        ),
    ),
    "dit": Stock(
        LIMITS["dit"],
        DPM,
        components={"vae": "vae"},
        convert=_all_classes,
        arguments=_of_labels,
        remarks=(DPM_REMARK,),
    ),
    "sd3": Stock(
        LIMITS["sd3"],
        EULER,
        components=_named("_3"),
        convert=_as_it_is,
        arguments=_of_states,
        remarks=(
            PADDING_REMARK,
            "`sigmas` are the times of Euler's steps: the grid of `num_inference_steps` ends at 1/1000.",
            "The attention of this network takes a mask and forgets it; that of HunyuanVideo computes the"
            " same with one.",
        ),
        empty=("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        joint=Joint(
            picture_first,
            ("diffusers.models.transformers.transformer_hunyuan_video", "HunyuanVideoAttnProcessor2_0"),
        ),
    ),
    "flux": Stock(
        LIMITS["flux"],
        EULER,
        components=_named("_2"),
        convert=_as_it_is,
        arguments=_of_tokens,
        remarks=(
            PADDING_REMARK,
            "Guidance is `true_cfg_scale`; the network was not made for `guidance_scale`.",
        ),
        empty=("text_encoder", "tokenizer"),
        joint=Joint(text_first),
    ),
}
