"""The export of one dense model, the student or the monolith, as a stock diffusers pipeline."""

import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.base.pictures import grid, png, to_images
from atoll.campaign.about import about, prompts
from atoll.campaign.assemble import defaults
from atoll.campaign.campaign import Campaign
from atoll.campaign.export import SHOWN, ExportRequest, copy_encoders, target
from atoll.campaign.sampling import dense
from atoll.ensemble.card import Card
from atoll.ensemble.expert import read_card, read_part
from atoll.export.encoders import by_name, check_encoders
from atoll.export.folder import MODEL_INDEX, PICTURE, README
from atoll.export.stock import Stock, check_card, model_index, stock_of
from atoll.export.stock_card import stock_card
from atoll.networks.checkpoint import WEIGHTS
from atoll.store.store import to_json

CARD = "card.json"


def export_stock(campaign: Campaign, request: ExportRequest) -> Path:
    """Write the folder: stock components, README.md, and the card of the training.

    Raises:
        ConfigError: no stock pipeline runs the model, or the folder holds something else.
        StoreError: the model is not published, or damaged.
    """
    prefix = dense(campaign, request.model)
    card = read_card(campaign.store, prefix)
    stock = stock_of(card.family)
    if request.experts != "auto":
        raise ConfigError(f"--experts goes with the ensemble, not with the {request.model}", "leave it out")
    root = target(request.to, stock.pipeline)
    found = by_name(card, (), ())
    check_card(card, found.get("vae"))
    check_encoders(card, found.get("text_encoder"), found.get("vae"))
    if card.text is not None and request.encoders == "name" and card.text["name"] == "minilm":
        raise ConfigError("minilm is on no hub, so it cannot be left out", "use --encoders auto")
    _, config, weights = read_part(campaign.store, prefix)
    root.mkdir(parents=True, exist_ok=True)
    parts = copy_encoders(root, card, request.encoders, found)
    settings, converted = stock.convert(dict(config), weights, card)
    _put(root / "transformer/config.json", to_json(settings))
    save_file(converted, root / "transformer" / WEIGHTS, metadata={"format": "pt"})
    _put(root / "scheduler/scheduler_config.json", to_json(dict(stock.scheduler)))
    _put(root / CARD, to_json(card.model_dump()))
    index = model_index(stock, str(config["_class_name"]), parts, version("diffusers"))
    _put(root / MODEL_INDEX, to_json(index))
    outside = _outside(card, parts, found)
    (root / PICTURE).unlink(missing_ok=True)
    if request.picture:
        _picture(campaign, card, stock, root, {name: found[name] for name in outside})
    told = about(campaign, {request.model: card.weights_sha256})
    told |= {"licence": request.licence} if request.licence else {}
    there = (root / PICTURE).is_file()
    text = stock_card(card, told, defaults(campaign), outside, picture=there, name=root.name)
    _put(root / README, text.encode())
    say(f"wrote {root}: the {request.model} as a {stock.pipeline} of diffusers; {README} says how to run it")
    return root


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _outside(
    card: Card, parts: dict[str, list[str | None]], found: dict[str, Any]
) -> dict[str, tuple[str, str]]:
    """Class and name of the components that have to be fetched by who runs the folder."""
    result = {}
    for name, part in found.items():
        if parts.get(name, [None])[0] is None and part is not None:
            producer = card.latents if name == "vae" else card.text or {}
            kind = "AutoTokenizer" if name == "tokenizer" else type(part).__name__
            result[name] = (kind, str(producer["name"]))
    return result


def _picture(campaign: Campaign, card: Card, stock: Stock, root: Path, given: dict[str, Any]) -> None:
    """Load what was written as a stranger would, sample it, and write `picture.png`."""
    import diffusers

    vae = card.latents["name"] != "none"
    more = given if vae or "vae" not in stock.components else {**given, "vae": None}
    diffusers.utils.logging.disable_progress_bar()
    kind = getattr(diffusers, stock.pipeline)
    pipe = kind.from_pretrained(str(root), low_cpu_mem_usage=False, **more)
    pipe.set_progress_bar_config(disable=True)
    arguments = stock.arguments(card, vae, defaults(campaign))
    if "prompt" in arguments:
        arguments["prompt"] = prompts(campaign, SHOWN) or [""]
    else:
        labels = arguments["class_labels"] if card.condition == "none" else range(card.shape["classes"])
        arguments["class_labels"] = [labels[n % len(labels)] for n in range(SHOWN)]
    count = len(arguments.get("prompt", arguments.get("class_labels", [])))
    generators = [torch.Generator().manual_seed(seed) for seed in range(count)]
    with warnings.catch_warnings():
        # diffusers turns tensors into arrays in a manner that numpy 2 frowns at.
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        images = pipe(generator=generators, **arguments).images
    pictures = to_images(images) if isinstance(images, torch.Tensor) else list(images)
    sheet = grid(pictures, columns=4, scale=max(1, 128 // pictures[0].width))
    (root / PICTURE).write_bytes(png(sheet))
