"""A single model as a stock diffusers pipeline, which runs where there is no Atoll.

diffusers' pipelines of DiT and PixArt want a scheduler that scales its input, which its flow-matching ones do
not. `DPMSolverMultistepScheduler` of first order does, and on flow sigmas its step is Euler's. Those of SD3
and Flux run Euler itself, but read padding: the functions at the end hide it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll.base.errors import ConfigError
from atoll.model.card import Card, text_length
from atoll.networks.pipelines import CLASSES, LIMITS, Limits, check_data, limits_of

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
class Stock:
    """How diffusers' own pipeline of a family runs a model of velocities.

    Attributes:
        limits: what it demands of a model.
        scheduler: content of `scheduler_config.json`, less the time shift.
        components: the pipeline's names of VAE, text encoder and tokenizer.
        remarks: what its users should know.
        empty: names of parts that it wants, and that no model here has.
        hide: where its attention reads text and picture together, a hook that hides padding from the network.
            Texts are then encoded outside.
        attention: module and class of an attention of diffusers that knows masks, where the network's own
            does not.
    """

    limits: Limits
    scheduler: Mapping[str, Any]
    components: Mapping[str, str]
    remarks: tuple[str, ...]
    empty: tuple[str, ...] = ()
    hide: Callable[[Any, Any, Any], Any] | None = None
    attention: tuple[str, str] | None = None

    def shifted(self, shift: float) -> dict[str, Any]:
        """Content of `scheduler_config.json` under a time shift."""
        return {**self.scheduler, "shift" if self.scheduler is EULER else "flow_shift": shift}


def stock_of(family: str) -> Stock:
    """How a family runs; `ConfigError` if that is not known."""
    limits_of(family)
    return STOCK[family]


def check_card(card: Card, config: Mapping[str, Any], vae: Any) -> None:
    """Refuse a trained model that the stock pipeline does not run: its network's config, and its VAE or None.

    Raises:
        ConfigError: says what is in the way.
    """
    limits, patch = limits_of(card.family), int(config["patch_size"])
    if limits.patch is not None:  # the network takes whole patches for its channels
        patch = math.isqrt(config["in_channels"] // card.shape.channels)
    check_data(card.family, card.latents, card.shape.classes, patch)
    if (card.prediction, card.schedule) != ("v", "rectified-flow"):
        what = (
            f"this {card.role} predicts {card.prediction} on {card.schedule}, a stock pipeline wants a flow"
        )
        raise ConfigError(what, "export the ensemble, or a student")
    if vae is not None and type(vae).__name__ not in ("AutoencoderKL", "AutoencoderTiny"):
        what = f"a stock {limits.pipeline} does not run {type(vae).__name__}"
        raise ConfigError(what, "it takes AutoencoderKL and AutoencoderTiny")


def with_all_classes(
    config: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of a DiT as DiTPipeline takes them, exactly the same network."""
    converted, null = dict(weights), int(config["num_embeds_ada_norm"])
    for name, table in weights.items():
        if name.endswith("class_embedder.embedding_table.weight"):
            # The null label moves to where the pipeline looks for it; labels in between have zeros.
            moved = torch.zeros(CLASSES + 1, table.shape[1], dtype=table.dtype)
            moved[:null], moved[CLASSES] = table[:null], table[null]
            converted[name] = moved
    return {**config, "num_embeds_ada_norm": CLASSES}, converted


def call_arguments(card: Card, factor: int | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a call of the family's pipeline.

    Args:
        factor: pixels a latent pixel; None without a VAE.
        defaults: `num_inference_steps` and `guidance_scale`.
    """
    steps, guidance = int(defaults["num_inference_steps"]), float(defaults["guidance_scale"])
    asked: dict[str, Any] = {"num_inference_steps": steps, "guidance_scale": guidance}
    if card.family == "dit":
        asked = {"class_labels": [0], **asked}
        if card.condition == "none":
            asked |= {"class_labels": [CLASSES], "guidance_scale": 1.0}
    elif card.family == "pixart":
        asked = {"prompt": ["a prompt"], **asked, "max_sequence_length": text_length(card)}
        asked |= {"clean_caption": False, "use_resolution_binning": False}
    elif card.family == "sd3":  # its own grid of times ends at 1/1000, so it is given another
        asked = {"sigmas": [1 - n / steps for n in range(steps)], "guidance_scale": guidance}
    elif card.family == "flux":  # its guidance by two calls has a name of its own, and it knows no size
        side = card.shape.size * (factor or WITHOUT_VAE)
        asked = {"height": side, "width": side, "num_inference_steps": steps, "true_cfg_scale": guidance}
    return asked if factor else {**asked, "output_type": "latent"}


# What a pipeline of SD3 or Flux needs from outside. README.md of an export prints these functions, so they
# know nothing of Atoll: torch is all that they use.


def encode(pipe: Any, tokenizer: Any, tower: Any, texts: list[str], length: int) -> dict[str, torch.Tensor]:
    """What the pipeline takes in place of texts: states, zeros where there is padding, and pooled zeros."""
    tokens = tokenizer(
        [*texts, *[""] * len(texts)],
        padding="max_length",
        truncation=True,
        max_length=length,
        return_tensors="pt",
    ).to(tower.device)
    seen = tokens["attention_mask"]
    with torch.no_grad():
        states = tower(input_ids=tokens["input_ids"], attention_mask=seen).last_hidden_state * seen[..., None]
    pooled = states.new_zeros(len(texts), pipe.transformer.config.pooled_projection_dim)
    return {
        "prompt_embeds": states[: len(texts)],
        "pooled_prompt_embeds": pooled,
        "negative_prompt_embeds": states[len(texts) :],
        "negative_pooled_prompt_embeds": pooled,
    }


def picture_first(network: Any, args: Any, kwargs: Any) -> Any:
    """Hide padding from SD3's attention, which reads the picture and then the text."""
    text, latents = kwargs["encoder_hidden_states"].any(dim=-1), kwargs["hidden_states"]
    patches = latents[0, 0].numel() // network.config.patch_size**2
    seen = torch.cat([text.new_ones(len(text), patches), text], dim=1)
    return args, {**kwargs, "joint_attention_kwargs": {"attention_mask": seen[:, None, None]}}


def text_first(network: Any, args: Any, kwargs: Any) -> Any:
    """Hide padding from Flux's attention, which reads the text and then the picture."""
    text, patches = kwargs["encoder_hidden_states"].any(dim=-1), kwargs["hidden_states"].shape[1]
    seen = torch.cat([text, text.new_ones(len(text), patches)], dim=1)
    return args, {**kwargs, "joint_attention_kwargs": {"attention_mask": seen[:, None, None]}}


def unpacked(tokens: torch.Tensor, side: int) -> torch.Tensor:
    """Latents `(B, C, side, side)` of Flux's patches of 2x2."""
    return torch.nn.functional.pixel_shuffle(tokens.mT.unflatten(2, (side // 2, side // 2)), 2)


def _named(number: str = "") -> dict[str, str]:
    return {"vae": "vae", "text_encoder": f"text_encoder{number}", "tokenizer": f"tokenizer{number}"}


STOCK: dict[str, Stock] = {
    "pixart": Stock(
        LIMITS["pixart"],
        DPM,
        _named(),
        (DPM_REMARK, "The pipeline turns prompts into lower case, and cuts them without an error."),
    ),
    "dit": Stock(LIMITS["dit"], DPM, {"vae": "vae"}, (DPM_REMARK,)),
    "sd3": Stock(
        LIMITS["sd3"],
        EULER,
        _named("_3"),
        (
            PADDING_REMARK,
            "`sigmas` are the times of Euler's steps: the grid of `num_inference_steps` ends at 1/1000.",
            "The attention of this network takes a mask and forgets it; that of HunyuanVideo computes the"
            " same with one.",
        ),
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        picture_first,
        ("diffusers.models.transformers.transformer_hunyuan_video", "HunyuanVideoAttnProcessor2_0"),
    ),
    "flux": Stock(
        LIMITS["flux"],
        EULER,
        _named("_2"),
        (PADDING_REMARK, "Guidance is `true_cfg_scale`; the network was not made for `guidance_scale`."),
        ("text_encoder", "tokenizer"),
        text_first,
    ),
}
