"""A single model as a stock diffusers pipeline, which runs where there is no Atoll.

diffusers' pipelines of DiT and PixArt want a scheduler that scales its input, which its flow-matching ones do
not. `DPMSolverMultistepScheduler` of first order does, and on flow sigmas its step is Euler's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.base.errors import ConfigError
from atoll.ensemble.card import Card
from atoll.export.conditions import text_length

Weights = Mapping[str, Tensor]
CLASSES = 1000
"""Class labels of DiTPipeline: the label after the last one is its null label."""
DPM = {
    "_class_name": "DPMSolverMultistepScheduler",
    "num_train_timesteps": 1000,
    "solver_order": 1,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}


@dataclass(frozen=True)
class Stock:
    """How diffusers' own pipeline of a family runs a model of velocities.

    Attributes:
        pipeline: the class.
        scheduler: content of `scheduler_config.json`.
        needs_vae: whether there has to be one.
        shifts: whether latents may be shifted.
        components: names of its parts beside transformer and scheduler.
        convert: config and weights as the pipeline takes them, exactly the same network.
        arguments: of a call, from the card, whether there is a VAE, and the campaign's defaults.
    """

    pipeline: str
    scheduler: Mapping[str, Any]
    needs_vae: bool
    shifts: bool
    components: tuple[str, ...]
    convert: Callable[[dict[str, Any], Weights, Card], tuple[dict[str, Any], dict[str, Tensor]]]
    arguments: Callable[[Card, bool, Mapping[str, Any]], dict[str, Any]]


def stock_of(family: str) -> Stock:
    """How a family runs; `ConfigError` if that is not known."""
    if family not in STOCK:
        raise ConfigError(
            f"no stock diffusers pipeline is known for the {family} family", f"use {' or '.join(STOCK)}"
        )
    return STOCK[family]


def check_settings(family: str, vae: str) -> None:
    """Refuse a model that no stock pipeline runs, as far as settings tell.

    Args:
        family: of the network.
        vae: name of the autoencoder, or `none`.

    Raises:
        ConfigError: says what is in the way.
    """
    stock = stock_of(family)
    if stock.needs_vae and vae == "none":
        raise ConfigError(
            f"a stock {stock.pipeline} needs a VAE, and data.vae is none",
            "set data.vae, or student.stock=false for a student that only Atoll runs",
        )


def check_data(family: str, latents: Mapping[str, Any], classes: int) -> None:
    """The same as far as the data tell.

    Args:
        family: of the network.
        latents: what made the latents.
        classes: number of class labels.
    """
    check_settings(family, str(latents["name"]))
    stock, shift = stock_of(family), float(latents.get("shift", 0.0))
    if shift and not stock.shifts:
        raise ConfigError(
            f"a stock {stock.pipeline} takes no shifted latents, and {latents['name']} shifts by {shift:g}",
            "use another VAE, or student.stock=false for a student that only Atoll runs",
        )
    if classes > CLASSES and family == "dit":
        raise ConfigError(
            f"a stock {stock.pipeline} knows {CLASSES} classes, and there are {classes}",
            "use fewer, or student.stock=false for a student that only Atoll runs",
        )


def check_card(card: Card, vae: Any) -> None:
    """The same once the model is trained, and of models that were trained for something else.

    Args:
        card: of the model.
        vae: the autoencoder, or None.
    """
    check_data(card.family, card.latents, card.shape["classes"])
    if (card.prediction, card.schedule) != ("v", "rectified-flow"):
        raise ConfigError(
            f"this {card.role} predicts {card.prediction} on {card.schedule}, a stock pipeline wants a flow",
            "export the ensemble, or a student",
        )
    if vae is not None and type(vae).__name__ not in ("AutoencoderKL", "AutoencoderTiny"):
        raise ConfigError(
            f"a stock {stock_of(card.family).pipeline} does not run {type(vae).__name__}",
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
    others = {name: list(parts.get(name, (None, None))) for name in stock.components}
    return {
        "_class_name": stock.pipeline,
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


def _of_labels(card: Card, vae: bool, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if card.condition == "none":
        return {"class_labels": [CLASSES], **_common(defaults), "guidance_scale": 1.0}
    return {"class_labels": [0], **_common(defaults)}


def _of_text(card: Card, vae: bool, defaults: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "prompt": ["a prompt"],
        **_common(defaults),
        "max_sequence_length": text_length(card),
        "clean_caption": False,
        "use_resolution_binning": False,
    }
    return found if vae else {**found, "output_type": "latent"}


STOCK: dict[str, Stock] = {
    "pixart": Stock(
        "PixArtAlphaPipeline",
        DPM,
        needs_vae=False,
        shifts=False,
        components=("vae", "text_encoder", "tokenizer"),
        convert=_as_it_is,
        arguments=_of_text,
    ),
    "dit": Stock(
        "DiTPipeline",
        DPM,
        needs_vae=True,
        shifts=False,
        components=("vae",),
        convert=_all_classes,
        arguments=_of_labels,
    ),
}
