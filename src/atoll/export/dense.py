"""The export of one dense model, the student or the monolith, as a stock diffusers pipeline."""

import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.base.pictures import grid, png, to_images
from atoll.campaign.baselines import single_network
from atoll.campaign.card_facts import about, prompts
from atoll.campaign.folder import Campaign
from atoll.export.encoders import by_name, check_encoders
from atoll.export.ensemble import SHOWN, ExportRequest, copy_encoders
from atoll.export.stock import Stock, check_card, model_index, stock_of
from atoll.export.stock_card import stock_card
from atoll.export.stock_run import encode, unpacked
from atoll.model.card import Card, text_length
from atoll.model.checkpoint import Checkpoint, use_default_permissions
from atoll.model.folder import MODEL_INDEX, PICTURE, README, defaults
from atoll.model.opened import output_folder
from atoll.networks.diffusers_checkpoint import WEIGHTS
from atoll.store.store import to_json

CARD = "card.json"


def export_stock(campaign: Campaign, request: ExportRequest) -> Path:
    """Write the folder: stock components, README.md, and the card of the training.

    Raises:
        ConfigError: no stock pipeline runs the model, or the folder holds something else.
        StoreError: the model is not published, or damaged.
    """
    prefix = single_network(campaign, request.model)
    published = Checkpoint(campaign.store, prefix)
    card = published.card
    stock = stock_of(card.family)
    if request.experts != "auto":
        raise ConfigError(f"--experts goes with the ensemble, not with the {request.model}", "leave it out")
    if request.key is not None:
        raise ConfigError(f"--key with --model {request.model}", "only exports of an ensemble are signed")
    root = output_folder(request.to, stock.limits.pipeline)
    components = by_name(card, (), (), campaign.config.encoders)
    config, weights = published.read()
    check_card(card, config, components.get("vae"))
    check_encoders(card, components.get("text_encoder"), components.get("vae"))
    if card.text is not None and request.encoders == "name" and card.text["name"] == "minilm":
        raise ConfigError("minilm is on no hub, so it cannot be left out", "use --encoders auto")
    root.mkdir(parents=True, exist_ok=True)
    parts = copy_encoders(root, card, request.encoders, components, stock.components)
    settings, converted = stock.convert(dict(config), weights, card)
    _put(root / "transformer/config.json", to_json(settings))
    save_file(converted, root / "transformer" / WEIGHTS, metadata={"format": "pt"})
    use_default_permissions(root / "transformer")
    _put(root / "scheduler/scheduler_config.json", to_json(stock.shifted(campaign.config.sampling.shift)))
    _put(root / CARD, to_json(card.to_json()))
    index = model_index(stock, str(config["_class_name"]), parts, version("diffusers"))
    _put(root / MODEL_INDEX, to_json(index))
    outside = _outside(card, stock, parts, components)
    picture = None
    if request.picture:
        given = {place: components[name] for name, place in stock.components.items() if place in outside}
        picture = _picture(campaign, card, stock, root, given)
    (root / PICTURE).unlink(missing_ok=True)
    if picture is not None:
        (root / PICTURE).write_bytes(picture)
    facts = about(campaign, {request.model: card.weights_sha256})
    facts |= {"licence": request.licence} if request.licence else {}
    factor = _factor(components.get("vae"))
    shown: dict[str, Any] = {"picture": picture is not None, "name": root.name}
    text = stock_card(card, facts, defaults(campaign.config.sampling), outside, factor=factor, **shown)
    _put(root / README, text.encode())
    say(f"wrote {root}: the {request.model} as a {stock.limits.pipeline} of diffusers; see its {README}")
    return root


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _factor(vae: Any) -> int | None:
    """Pixels a latent pixel, as diffusers' pipelines count them; None without a VAE."""
    return None if vae is None else int(2 ** (len(vae.config.block_out_channels) - 1))


def _outside(
    card: Card, stock: Stock, parts: dict[str, list[str | None]], components: dict[str, Any]
) -> dict[str, tuple[str, str]]:
    """Class and name of the components, as the pipeline calls them, that who runs the folder has to fetch."""
    result = {}
    for name, place in stock.components.items():
        part = components.get(name)
        if parts.get(name, [None])[0] is None and part is not None:
            producer = card.latents if name == "vae" else card.text or {}
            kind = "AutoTokenizer" if name == "tokenizer" else type(part).__name__
            result[place] = (kind, str(producer["name"]))
    return result


def _picture(campaign: Campaign, card: Card, stock: Stock, root: Path, given: dict[str, Any]) -> bytes:
    """Load what was written as a stranger would, and sample it; a PNG."""
    import diffusers

    absent = [*stock.empty] + ["vae"] * ("vae" in stock.components and card.latents["name"] == "none")
    diffusers.utils.logging.disable_progress_bar()
    kind = getattr(diffusers, stock.limits.pipeline)
    pipe = kind.from_pretrained(str(root), low_cpu_mem_usage=False, **dict.fromkeys(absent), **given)
    pipe.set_progress_bar_config(disable=True)
    count, arguments = _asked(campaign, card, stock, pipe)
    generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
    with warnings.catch_warnings():
        # diffusers turns tensors into arrays in a manner that numpy 2 frowns at.
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        images = pipe(generator=generators, **arguments).images
    if isinstance(images, torch.Tensor):
        images = to_images(unpacked(images, card.shape.size) if stock.limits.patch else images)
    sheet = grid(list(images), columns=4, scale=max(1, 128 // images[0].width))
    return png(sheet)


def _asked(campaign: Campaign, card: Card, stock: Stock, pipe: Any) -> tuple[int, dict[str, Any]]:
    """How many pictures, and the arguments of the call, the pipeline made ready for it."""
    arguments = stock.arguments(card, _factor(getattr(pipe, "vae", None)), defaults(campaign.config.sampling))
    if card.condition != "text":
        labels = arguments["class_labels"] if card.condition == "none" else range(card.shape.classes)
        return SHOWN, {**arguments, "class_labels": [labels[n % len(labels)] for n in range(SHOWN)]}
    texts = prompts(campaign, SHOWN) or [""]
    if stock.joint is None:
        return len(texts), {**arguments, "prompt": texts}
    if pipe.vae is not None and not card.latents["shift"]:
        pipe.vae.register_to_config(shift_factor=0.0)
    if stock.joint.attention:
        module, name = stock.joint.attention
        pipe.transformer.set_attn_processor(getattr(import_module(module), name)())
    pipe.transformer.register_forward_pre_hook(stock.joint.hide, with_kwargs=True)
    tokenizer, tower = (getattr(pipe, stock.components[name]) for name in ("tokenizer", "text_encoder"))
    states = encode(pipe, tokenizer, tower, texts, text_length(card))
    return len(texts), {**arguments, **states}
