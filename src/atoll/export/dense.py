"""The export of one dense model, the student or the monolith, as a stock diffusers pipeline."""

import inspect
import json
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.base.markdown import code, render
from atoll.base.pictures import grid, png, to_images
from atoll.base.text import count
from atoll.campaign.card_facts import model_card_facts, prompts
from atoll.campaign.folder import Campaign
from atoll.export.encoders import by_name, check_encoders, copy_encoders
from atoll.export.ensemble import SHOWN, ExportRequest
from atoll.export.stock import (
    WITHOUT_VAE,
    Stock,
    call_arguments,
    check_card,
    encode,
    stock_of,
    unpacked,
    with_all_classes,
)
from atoll.model.card import Card, text_length
from atoll.model.checkpoint import CARD, Checkpoint, use_default_permissions
from atoll.model.folder import MODEL_INDEX, PICTURE, README, defaults
from atoll.model.model_card import shared_facts
from atoll.model.opened import output_folder
from atoll.model.stored import WEIGHTS
from atoll.store.store import to_json


def export_stock(campaign: Campaign, request: ExportRequest) -> Path:
    """Write the folder: stock components, README.md, and the card of the training.

    Raises:
        ConfigError: no stock pipeline runs the model, or the folder holds something else.
    """
    published = Checkpoint.of_run(campaign.store, request.model)
    card, sampling = published.card, campaign.config.sampling
    stock = stock_of(card.family)
    if request.experts != "auto":
        raise ConfigError(f"--experts goes with the ensemble, not with the {request.model}", "leave it out")
    if request.key is not None:
        raise ConfigError(f"--key with --model {request.model}", "only exports of an ensemble are signed")
    root = output_folder(request.to, stock.limits.pipeline)
    loaded = by_name(card, allowed=campaign.config.encoders)
    vae = loaded.get("vae")
    config, weights = published.read()
    check_card(card, config, vae)
    check_encoders(card, loaded.get("text_encoder"), vae)
    if card.text is not None and request.encoders == "name" and card.text["name"] == "minilm":
        raise ConfigError("minilm is on no hub, so it cannot be left out", "use --encoders auto")

    root.mkdir(parents=True, exist_ok=True)
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
        config, weights = with_all_classes(config, weights)
    contents = {
        "transformer/config.json": config,
        "scheduler/scheduler_config.json": stock.shifted(sampling.shift),
        CARD: card.to_json(),
        MODEL_INDEX: index,
    }
    for name, content in contents.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(to_json(content))
    save_file(weights, root / "transformer" / WEIGHTS, metadata={"format": "pt"})
    use_default_permissions(root / "transformer")

    # By the pipeline's names the components that whoever runs the folder has to fetch: class and name.
    outside = {}
    for name, place in stock.components.items():
        if name in loaded and index[place] == [None, None]:
            kind = "AutoTokenizer" if name == "tokenizer" else type(loaded[name]).__name__
            producer = card.latents if name == "vae" else card.text or {}
            outside[place] = (kind, str(producer["name"]))
    (root / PICTURE).unlink(missing_ok=True)
    if request.picture:
        given = {place: loaded[name] for name, place in stock.components.items() if place in outside}
        (root / PICTURE).write_bytes(_picture(campaign, card, stock, root, given))
    facts = model_card_facts(campaign, {request.model: card.weights_sha256})
    facts |= {"licence": request.licence} if request.licence else {}
    text = render(
        "stock.md",
        "atoll.export",
        "atoll.model",
        **shared_facts(card, facts, request.picture),
        parameters=count(card.parameters),
        experts=sum(part != "router" for part in card.provenance.get("student", {}).get("teachers", {})),
        stock=stock,
        without_vae=WITHOUT_VAE,
        outside=outside,
        snippet=_snippet(stock, card, outside, _factor(vae), defaults(sampling), root.name),
        training=_training(card, facts),
    )
    (root / README).write_text(text)
    say(f"wrote {root}: the {request.model} as a {stock.limits.pipeline} of diffusers; see its {README}")
    return root


def _factor(vae: Any) -> int | None:
    """Pixels a latent pixel, as diffusers' pipelines count them; None without a VAE."""
    return None if vae is None else int(2 ** (len(vae.config.block_out_channels) - 1))


def _picture(campaign: Campaign, card: Card, stock: Stock, root: Path, given: dict[str, Any]) -> bytes:
    """Load what was written as a stranger would, and do what README.md says; a PNG."""
    import diffusers

    absent = [*stock.empty] + ["vae"] * ("vae" in stock.components and card.latents["name"] == "none")
    diffusers.utils.logging.disable_progress_bar()
    kind = getattr(diffusers, stock.limits.pipeline)
    pipe = kind.from_pretrained(str(root), low_cpu_mem_usage=False, **dict.fromkeys(absent), **given)
    pipe.set_progress_bar_config(disable=True)
    arguments = call_arguments(card, _factor(getattr(pipe, "vae", None)), defaults(campaign.config.sampling))
    texts = prompts(campaign, SHOWN) or [""]
    drawn = len(texts) if card.condition == "text" else SHOWN
    if card.condition != "text":
        labels = arguments["class_labels"] if card.condition == "none" else range(card.shape.classes)
        arguments["class_labels"] = [labels[n % len(labels)] for n in range(SHOWN)]
    elif stock.hide is None:
        arguments["prompt"] = texts
    else:
        if pipe.vae is not None and not card.latents["shift"]:
            # These pipelines add the shift of the VAE's config, and fail where it is None.
            pipe.vae.register_to_config(shift_factor=0.0)
        if stock.attention:
            module, name = stock.attention
            pipe.transformer.set_attn_processor(getattr(import_module(module), name)())
        pipe.transformer.register_forward_pre_hook(stock.hide, with_kwargs=True)
        tokenizer, tower = (getattr(pipe, stock.components[name]) for name in ("tokenizer", "text_encoder"))
        arguments |= encode(pipe, tokenizer, tower, texts, text_length(card))
    generators = [torch.Generator().manual_seed(seed) for seed in range(drawn)]
    with warnings.catch_warnings():
        # diffusers turns tensors into arrays in a manner that numpy 2 frowns at.
        warnings.filterwarnings("ignore", message="__array__ implementation", category=DeprecationWarning)
        images = pipe(generator=generators, **arguments).images
    if isinstance(images, torch.Tensor):
        images = to_images(unpacked(images, card.shape.size) if stock.limits.patch else images)
    return png(grid(list(images), columns=4, scale=max(1, 128 // images[0].width)))


def _snippet(
    stock: Stock,
    card: Card,
    outside: Mapping[str, tuple[str, str]],
    factor: int | None,
    defaults: Mapping[str, Any],
    name: str,
) -> str:
    """A program that loads the folder of this name and writes one picture."""
    # Imports: classes of diffusers and transformers that are fetched, and what the printed functions need.
    classes = sorted({kind for part, (kind, _) in outside.items() if part == "vae"})
    others = sorted({kind for part, (kind, _) in outside.items() if part != "vae"})
    lines = ["from typing import Any", ""] if stock.hide else []
    lines += ["import torch", f"from diffusers import {', '.join([*classes, stock.limits.pipeline])}"]
    lines += ["from {} import {}".format(*stock.attention)] if stock.attention else []
    lines += [f"from transformers import {', '.join(others)}"] if others else []

    # The pipeline, and the texts of one that does not encode them itself.
    given = [f"{part}={kind}.from_pretrained({json.dumps(where)})" for part, (kind, where) in outside.items()]
    given += [f"{part}=None" for part in stock.empty]
    given += ["vae=None"] if factor is None and "vae" in stock.components else []
    lines += ["", f"pipe = {stock.limits.pipeline}.from_pretrained("]
    lines += [f"    {part}," for part in (json.dumps(name), *given)] + [")"]
    if factor and stock.limits.shifts and not card.latents["shift"]:
        lines.append("pipe.vae.register_to_config(shift_factor=0.0)")
    if stock.hide:
        lines += ["", "", inspect.getsource(encode), "", inspect.getsource(stock.hide), ""]
        if stock.attention:
            lines.append(f"pipe.transformer.set_attn_processor({stock.attention[1]}())")
        hook = f"pipe.transformer.register_forward_pre_hook({stock.hide.__name__}, with_kwargs=True)"
        encoders = f"pipe.{stock.components['tokenizer']}, pipe.{stock.components['text_encoder']}"
        length = text_length(card)
        lines += [hook, f'texts = encode(pipe, {encoders}, ["a prompt"], length={length})']

    # The call, and pictures from what it gives.
    call = call_arguments(card, factor, defaults)
    values = {key: _quoted(value) for key, value in call.items()}
    if "sigmas" in call:
        steps = len(call["sigmas"])
        values["sigmas"] = f"[1 - n / {steps} for n in range({steps})]"
    lines += ["result = pipe("] + (["    **texts,"] if stock.hide else [])
    lines += [f"    {key}={value}," for key, value in values.items()]
    lines += ["    generator=torch.Generator().manual_seed(0),", ")"]
    latents = "result.images"
    if stock.limits.patch and factor is None:
        lines += ["", "", inspect.getsource(unpacked), ""]
        latents = f"unpacked(result.images, {card.shape.size})"
    whole = call.get("output_type") != "latent"
    lines.append(f"images = {latents if whole else f'pipe.image_processor.postprocess({latents})'}")
    return "\n".join([*lines, 'images[0].save("picture.png")'])


def _quoted(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_quoted, value)) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _training(card: Card, about: Mapping[str, Any]) -> list[list[Any]]:
    student, init = card.provenance.get("student", {}), card.provenance.get("init", {})
    rows: list[list[Any]] = [
        ["training rows", f"{card.rows:,}"],
        ["samples seen", f"{card.samples:,} in batches of {card.batch}"],
        ["training FLOPs" + (", teachers' included" if student else ""), f"{card.train_flops:.3g}"],
    ]
    if student and about.get("monolith_flops"):
        rows.append(["of the monolith's FLOPs", f"{card.train_flops / float(about['monolith_flops']):.3f}"])
    if student:
        by_cluster = student["teacher"] == "cluster"
        teacher = "the expert of the sample's cluster" if by_cluster else f"experts, {student['routing']}"
        rows.append(["teacher", teacher])
        if student.get("data_weight"):
            rows.append(["weight of the data's loss", f"{student['data_weight']:g}"])
        rows += [[f"teacher {name}", code(digest)] for name, digest in student["teachers"].items()]
    rows.append(["started from", init.get("start") or init.get("kind", "scratch")])
    rows.append(["weights before conversion", code(card.weights_sha256)])
    return rows
