"""The student or the monolith as a stock diffusers pipeline, which runs where there is no Atoll.

diffusers' pipelines of DiT and PixArt want a scheduler that scales its input, which its flow-matching ones do
not. `DPMSolverMultistepScheduler` of first order does, and on flow sigmas its step is Euler's. Those of SD3
and Flux run Euler itself, but read padding: the functions at the end hide it.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.base.markdown import render
from atoll.base.pictures import grid, png, to_images
from atoll.base.text import count
from atoll.campaign.card_facts import model_card_facts, prompts
from atoll.campaign.folder import Campaign, single_network
from atoll.encoders.registry import text_parts, with_tokenizers
from atoll.encoders.text import prompt_length
from atoll.export.call import quiet_loading
from atoll.export.encoders import by_name, check_encoders, copy_encoders
from atoll.export.ensemble import SHOWN, ExportRequest
from atoll.model.card import WEIGHTS, Card
from atoll.model.checkpoint import CARD
from atoll.model.folder import MODEL_INDEX, PICTURE, README, defaults, scheduler_shift
from atoll.model.generation import Generation
from atoll.model.model_card import shared_facts
from atoll.model.opened import mark_incomplete, output_folder
from atoll.networks.families import PIXELS
from atoll.networks.pipelines import CLASSES, LIMITS, Limits, check_data, limits_of
from atoll.store.tensors import to_blocks

DPM = {
    "_class_name": "DPMSolverMultistepScheduler",
    "num_train_timesteps": 1000,
    "solver_order": 1,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
}
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
FLOW_MAP = {"_class_name": "FlowMapEulerDiscreteScheduler", "num_train_timesteps": 1000}
WITHOUT_VAE = 8
"""Factor between pictures and latents that diffusers' pipelines assume where there is no VAE."""
PIXART = [(32, 8), (64, 8), (128, 8)]
"""Sides of latents, and pixels of each, for which PixArt's pipeline has sizes of images."""
DPM_REMARK = (
    "The scheduler is `DPMSolverMultistepScheduler`, because this pipeline does not run flow-matching ones."
    " Its step is Euler's, and it rounds times to thousandths."
)
FEW_REMARK = (
    "The scheduler is `FlowMapEulerDiscreteScheduler` of diffusers 0.39 or later: its times are exactly those"
    " that the network learned, which few steps depend on."
)
PADDING_REMARK = (
    "Training hid padding from the network, and the pipeline alone would show it. So `encode` sets padding to"
    " zero, and the hook masks it in the attention. The pooled text vector is zero, as in training. Prompts"
    " that are too long are cut without an error."
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

    def whole(self, parts: Sequence[str]) -> "Stock":
        """The same for a model that has all text encoders of its pipeline, and saw padding as that does."""
        if len(parts) != (count := 1 + len(self.empty) // 2):
            what = f"a stock {self.limits.pipeline} has {count} text encoders, and this model {len(parts)}"
            raise ConfigError(what, "export the ensemble")
        names = {name: name for name in ("vae", *with_tokenizers(parts))}
        return replace(self, components=names, remarks=(), empty=(), hide=None, attention=None)

    def shifted(self, generation: Generation, card: Card, patch: int) -> dict[str, Any]:
        """Content of `scheduler_config.json` under a time shift."""
        if self.scheduler is EULER:
            return {**self.scheduler, **scheduler_shift(generation.shift, patch)}
        # The others' pipelines tell them of no size, and diffusers' two classes have two names for it.
        name = "flow_shift" if self.scheduler is DPM else "shift"
        return {**self.scheduler, name: generation.at(*card.shape.usual).shift}


def export_stock(campaign: Campaign, request: ExportRequest) -> Path:
    """Write the folder: stock components, README.md, and the card of the training.

    `ConfigError` where no stock pipeline runs the model, or the folder holds something else.
    """
    published = single_network(campaign, request.model)
    if campaign.config.trusted:
        published.check_trusted(campaign.config.trusted)
    card, few = published.card, "steps" in published.card.sampling
    sampling = campaign.config.sampling.with_(**card.sampling)
    limits_of(card.family)
    stock, several = (STOCK | FEW if few else STOCK)[card.family], card.shape.pooled_width > 0
    if several:
        stock = stock.whole([*text_parts(card.text)])
        if card.text is not None and not 77 <= card.text["max_length"] <= 512:
            what = f"reads 77 to 512 tokens, and this model {card.text['max_length']} (data.text_length)"
            raise ConfigError(f"a stock {stock.limits.pipeline} {what}", "export the ensemble")
        if request.encoders != "copy":  # README.md could not name each with its tokenizer
            raise ConfigError("several text encoders go along with the model", "use --encoders copy")
    for option, asked in (("experts", request.experts != "auto"), ("sign", request.key is not None)):
        if asked:
            raise ConfigError(f"--{option} goes with the ensemble, not the {request.model}", "leave it out")
    root = output_folder(request.to, stock.limits.pipeline)
    loaded = by_name(card, allowed=campaign.config.encoders)
    vae = loaded.get("vae")
    config, weights = published.read()

    # What no stock pipeline runs, before anything is written.
    patch = int(config["patch_size"])
    if stock.limits.patch is not None:  # the network takes whole patches for its channels
        patch = math.isqrt(config["in_channels"] // card.shape.channels)
    check_data(card.family, card.latents, card.shape.classes, patch)
    if (card.prediction, card.schedule) != ("v", "rectified-flow"):
        learnt = f"{card.prediction} on {card.schedule}, a stock pipeline wants a flow"
        raise ConfigError(f"this {card.role} predicts {learnt}", "export the ensemble, or a student")
    # Pixels a latent pixel, as diffusers' pipelines count them.
    factor = None if vae is None else int(2 ** (len(vae.config.block_out_channels) - 1))
    side, aspects = config.get("sample_size"), config.get("use_additional_conditions")
    if aspects is None:  # as the class decides
        aspects = card.family == "pixart" and side == 128
    for wrong, why in (
        (card.family == "dit" and side != card.shape.size, f"draws latents of {side} px alone"),
        (card.family == "flux" and "interpolation_scale" in config, "does not interpolate positions"),
        (aspects and (side, factor) != (128, PIXELS), f"embeds sizes at {128 * PIXELS} px alone"),
        (aspects and few, "passes no sizes as conditions, where steps are few"),
    ):
        if wrong:
            raise ConfigError(f"a stock {stock.limits.pipeline} {why}", "export the ensemble")
    if vae is not None and type(vae).__name__ not in ("AutoencoderKL", "AutoencoderTiny"):
        what = f"a stock {stock.limits.pipeline} does not run {type(vae).__name__}"
        raise ConfigError(what, "export the ensemble; stock ones run AutoencoderKL and AutoencoderTiny")
    check_encoders(card, loaded)
    if card.text is not None and request.encoders == "name" and card.text["name"] == "minilm":
        raise ConfigError("minilm is on no hub, so it cannot be left out", "use --encoders auto")

    folder = mark_incomplete(root, stock.limits.pipeline)
    parts = copy_encoders(root, card, request.encoders, loaded, stock.components)
    index: dict[str, Any] = {
        "_class_name": stock.limits.pipeline,
        "_diffusers_version": version("diffusers"),
        "transformer": ["diffusers", config["_class_name"]],
        "scheduler": ["diffusers", stock.scheduler["_class_name"]],
        **{place: parts.get(name, [None, None]) for name, place in stock.components.items()},
        **{place: [None, None] for place in stock.empty},
    }
    if stock.limits.classes is not None:
        # The null label moves to where DiTPipeline looks for it; labels in between have zeros.
        null, config = int(config["num_embeds_ada_norm"]), {**config, "num_embeds_ada_norm": CLASSES}
        for name, table in weights.items():
            if name.endswith("class_embedder.embedding_table.weight"):
                moved = torch.zeros(CLASSES + 1, table.shape[1], dtype=table.dtype)
                moved[:null], moved[CLASSES] = table[:null], table[null]
                weights = {**weights, name: moved}
    contents = {
        "transformer/config.json": config,
        "scheduler/scheduler_config.json": stock.shifted(sampling, card, patch),
        CARD: card.to_json(),
        MODEL_INDEX: index,
    }
    for name, content in contents.items():
        folder.put_json(name, content)
    folder.write(f"transformer/{WEIGHTS}", to_blocks(weights, {"format": "pt"}))

    # Prompts may be longer than training's captions: as long as the text encoder takes.
    length = int(card.text["max_length"]) if card.text else 0
    length = prompt_length(loaded["text_encoder"], length) if card.text and not several else length
    arguments = call_arguments(card, length, factor, defaults(sampling))

    # By the pipeline's names the components that whoever runs the folder has to fetch: class and name.
    outside = {}
    for name, place in stock.components.items():
        if name in loaded and index[place] == [None, None]:
            kind = "AutoTokenizer" if name == "tokenizer" else type(loaded[name]).__name__
            outside[place] = (kind, str((card.latents if name == "vae" else card.text or {})["name"]))
    # The picture of an earlier export would show what another model draws.
    folder.delete(PICTURE)
    if request.picture:
        given = {place: loaded[name] for name, place in stock.components.items() if place in outside}
        folder.put(PICTURE, _picture(campaign, card, stock, root, given, arguments, length))
    facts = model_card_facts(campaign, {request.model: card.weights_sha256})
    facts |= {"licence": request.licence} if request.licence else {}
    student = card.provenance.get("student", {})
    # The hub shows a program that gives a pipeline of diffusers its name and a prompt. PixArt's alone runs on
    # that, and only for the published networks' sizes.
    sides = config.get("sample_size"), factor
    alone = card.family == "pixart" and not outside and sides in PIXART and not few
    text = render(
        "stock.md",
        "atoll.export",
        "atoll.model",
        **shared_facts(card, facts, request.picture),
        parameters=count(card.parameters),
        student=student,
        init=card.provenance.get("init", {}),
        experts=sum(part != "router" for part in student.get("teachers", {})),
        stock=stock,
        without_vae=WITHOUT_VAE,
        outside=outside,
        alone=alone,
        name=request.name,
        role=card.role,
        in_pixels=vae is None,
        call=arguments,
        length=length,
        source=inspect.getsource,
        encode=encode,
        unpacked=unpacked,
    )
    folder.put(README, text.encode())
    say(f"wrote {root}: the {request.model} as a {stock.limits.pipeline} of diffusers; see its {README}")
    return root


def call_arguments(
    card: Card, length: int, factor: int | None, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of a call of the family's pipeline; `factor` is pixels a latent pixel, None without a VAE."""
    steps, guidance = int(defaults["num_inference_steps"]), float(defaults["guidance_scale"])
    asked: dict[str, Any] = {"num_inference_steps": steps, "guidance_scale": guidance}
    if card.family == "dit":
        asked = {"class_labels": [0], **asked}
        if card.condition == "none":
            # Without classes both branches of guidance would be the null one, at twice the cost.
            asked |= {"class_labels": [CLASSES], "guidance_scale": 1.0}
    elif card.family == "pixart":
        asked = {"prompt": ["a prompt"], **asked, "max_sequence_length": length}
        # Training saw captions uncleaned. Binning knows three latent sizes only, and raises for all others.
        asked |= {"clean_caption": False, "use_resolution_binning": False}
    elif card.family == "sd3":  # its own grid of times ends at 1/1000, so it is given another
        height, width = (side * (factor or WITHOUT_VAE) for side in card.shape.usual)
        asked = {"sigmas": [1 - n / steps for n in range(steps)], "guidance_scale": guidance}
        asked |= {"height": height, "width": width}  # a table of positions may be made for larger ones
    elif card.family == "flux":  # its guidance by two calls has a name of its own, and it knows no size
        side = card.shape.size * (factor or WITHOUT_VAE)
        asked = {"height": side, "width": side, "num_inference_steps": steps, "true_cfg_scale": guidance}
    if card.shape.pooled_width:  # the pipeline encodes prompts by itself
        asked |= {"prompt": ["a prompt"], "max_sequence_length": length}
        if card.shape.guidance:
            asked["guidance_scale"] = asked.pop("true_cfg_scale")
        elif card.family == "flux":
            asked["negative_prompt"] = [""]
    return asked if factor else {**asked, "output_type": "latent"}


def _picture(
    campaign: Campaign,
    card: Card,
    stock: Stock,
    root: Path,
    given: dict[str, Any],
    arguments: dict[str, Any],
    length: int,
) -> bytes:
    """Load what was written as a stranger would, and do what README.md says; a PNG."""
    import diffusers

    absent = [*stock.empty] + ["vae"] * ("vae" in stock.components and card.latents["name"] == "none")
    kind = getattr(diffusers, stock.limits.pipeline)
    # diffusers warns of its own default where accelerate is not installed.
    with quiet_loading():
        pipe = kind.from_pretrained(str(root), low_cpu_mem_usage=False, **dict.fromkeys(absent), **given)
    pipe.set_progress_bar_config(disable=True)
    if stock.scheduler is FLOW_MAP:
        pipe.scheduler.init_noise_sigma = 1.0
    arguments, texts = dict(arguments), prompts(campaign, SHOWN) or [""]
    drawn = len(texts) if card.condition == "text" else SHOWN
    if stock.limits.shifts and pipe.vae is not None and not card.latents["shift"]:
        # These pipelines add the shift of the VAE's config, and fail where it is None.
        pipe.vae.register_to_config(shift_factor=0.0)
    if card.condition != "text":
        labels = arguments["class_labels"] if card.condition == "none" else range(card.shape.classes)
        arguments["class_labels"] = [labels[n % len(labels)] for n in range(SHOWN)]
    elif stock.hide is None:
        arguments["prompt"] = texts
        if "negative_prompt" in arguments:
            arguments["negative_prompt"] = [""] * drawn
    else:
        if stock.attention:
            module, name = stock.attention
            pipe.transformer.set_attn_processor(getattr(import_module(module), name)())
        pipe.transformer.register_forward_pre_hook(stock.hide, with_kwargs=True)
        tokenizer, tower = (getattr(pipe, stock.components[name]) for name in ("tokenizer", "text_encoder"))
        arguments |= encode(pipe, tokenizer, tower, texts, length)
    generators = [torch.Generator().manual_seed(seed) for seed in range(drawn)]
    with warnings.catch_warnings():
        # diffusers turns tensors into arrays in a manner that numpy 2 frowns at.
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        images = pipe(generator=generators, **arguments).images
    if isinstance(images, torch.Tensor):
        images = to_images(unpacked(images, card.shape.size) if stock.limits.patch else images)
    return png(grid(list(images), columns=4, scale=max(1, 128 // images[0].width)))


# What a pipeline of SD3 or Flux needs from outside. README.md of an export prints these functions, so they
# know nothing of Atoll: torch is all that they use.


def encode(pipe: Any, tokenizer: Any, tower: Any, texts: list[str], length: int) -> dict[str, torch.Tensor]:
    """What the pipeline takes in place of texts: states, zeros where there is padding, and pooled zeros."""
    tokens = tokenizer(
        [*texts, *[""] * len(texts)],
        padding=True,
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
        (DPM_REMARK, "The pipeline turns prompts into lower case, and cuts long ones without an error."),
    ),
    "dit": Stock(LIMITS["dit"], DPM, {"vae": "vae"}, (DPM_REMARK,)),
    "sd3": Stock(
        LIMITS["sd3"],
        EULER,
        _named("_3"),
        (
            PADDING_REMARK,
            "Pass `sigmas`, the times of Euler's steps: the pipeline's own grid ends at 1/1000.",
            "The network's own attention ignores its mask, so HunyuanVideo's, which does not, replaces it.",
        ),
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        picture_first,
        ("diffusers.models.transformers.transformer_hunyuan_video", "HunyuanVideoAttnProcessor2_0"),
    ),
    "flux": Stock(
        LIMITS["flux"],
        EULER,
        _named("_2"),
        (PADDING_REMARK, "Guidance is `true_cfg_scale`; the network was not trained for `guidance_scale`."),
        ("text_encoder", "tokenizer"),
        text_first,
    ),
}

# At few steps no time may be rounded. This scheduler has no `init_noise_sigma`, which PixArt's pipelines ask
# for. Where there is one step, Alpha's takes the second value of it, which only schedulers of LCM have.
FEW: dict[str, Stock] = {
    "pixart": replace(
        STOCK["pixart"],
        limits=Limits("PixArtSigmaPipeline"),
        scheduler=FLOW_MAP,
        remarks=(FEW_REMARK, *STOCK["pixart"].remarks[1:]),
    ),
    "dit": replace(STOCK["dit"], scheduler=FLOW_MAP, remarks=(FEW_REMARK,)),
}
"""The same for models of few steps, where that is something else."""
