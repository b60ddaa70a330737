"""README.md of a stock diffusers pipeline: how it is run, and where it comes from."""

import inspect
from collections.abc import Mapping
from typing import Any

from atoll.ensemble.card import Card, text_length
from atoll.ensemble.model_card import (
    PAPER,
    count,
    data_block,
    encoders_block,
    evaluation_block,
    head_block,
    licences_block,
    table,
)
from atoll.export.stock import WITHOUT_VAE, Stock, stock_of
from atoll.export.stock_run import encode, unpacked


def stock_card(
    card: Card,
    about: Mapping[str, Any],
    defaults: Mapping[str, Any],
    outside: Mapping[str, tuple[str, str]],
    *,
    factor: int | None,
    picture: bool,
    name: str,
) -> str:
    """Text of README.md.

    Args:
        card: of the model.
        about: what it does not say, as for `model_card.model_card`.
        defaults: `num_inference_steps` and `guidance_scale` of the snippet.
        outside: class and name of the encoders that the folder does not hold.
        factor: pixels a latent pixel, None without a VAE.
        picture: whether `picture.png` lies beside it.
        name: how the snippet calls the folder.
    """
    title = str(about.get("name") or "Model")
    blocks = [head_block(card, about), f"# {title}: {card.role}", _summary(card)]
    if picture:
        blocks.append("![Samples](picture.png)")
    blocks += [
        "## Use\n\n" + _needs(card, outside) + "\n\n" + snippet(card, defaults, outside, factor, name),
        _remarks(card),
        "## Training\n\n" + _training(card, about),
        "## Data and partition\n\n" + data_block(card, about),
        "## Evaluation\n\n" + evaluation_block(about.get("evaluation")),
        "## Encoders\n\n" + encoders_block(card),
        "## Licences\n\n" + licences_block(card, about),
        f"The method: {PAPER}. Made with Atoll {card.provenance.get('atoll', '')}".rstrip() + ".",
    ]
    return "\n\n".join(blocks) + "\n"


def snippet(
    card: Card,
    defaults: Mapping[str, Any],
    outside: Mapping[str, tuple[str, str]],
    factor: int | None,
    name: str,
) -> str:
    """A program that loads the folder and writes one picture.

    Args:
        card: of the model.
        defaults: steps and guidance.
        outside: class and name of the encoders that the folder does not hold.
        factor: pixels a latent pixel, None without a VAE.
        name: of the folder, from where the program runs.
    """
    stock = stock_of(card.family)
    given = [f'{part}={kind}.from_pretrained("{where}")' for part, (kind, where) in outside.items()]
    given += [f"{part}=None" for part in stock.empty]
    given += ["vae=None"] if factor is None and "vae" in stock.components else []
    lines = [*_imports(stock, outside), "", f"pipe = {stock.limits.pipeline}.from_pretrained("]
    lines += [f"    {part}," for part in (_quoted(name), *given)] + [")"]
    if factor and stock.limits.shifts and not card.latents["shift"]:
        lines.append("pipe.vae.register_to_config(shift_factor=0.0)")
    lines += _texts(stock, card)
    call = stock.arguments(card, factor, defaults)
    lines += ["result = pipe("] + (["    **texts,"] if stock.joint else [])
    lines += [f"    {key}={_value(key, value)}," for key, value in call.items()]
    lines += ["    generator=torch.Generator().manual_seed(0),", ")"]
    latents = "result.images"
    if stock.limits.patch and factor is None:
        lines += ["", "", inspect.getsource(unpacked), ""]
        latents = f"unpacked(result.images, {card.shape.size})"
    if call.get("output_type") == "latent":
        lines.append(f"images = pipe.image_processor.postprocess({latents})")
    else:
        lines.append("images = result.images")
    lines.append('images[0].save("picture.png")')
    return "\n".join(["```python", *lines, "```"])


def _imports(stock: Stock, outside: Mapping[str, tuple[str, str]]) -> list[str]:
    classes = sorted({kind for part, (kind, _) in outside.items() if part == "vae"})
    lines = ["import torch", f"from diffusers import {', '.join([*classes, stock.limits.pipeline])}"]
    if stock.joint and stock.joint.attention:
        lines.append("from {} import {}".format(*stock.joint.attention))
    if others := sorted({kind for part, (kind, _) in outside.items() if part != "vae"}):
        lines.append(f"from transformers import {', '.join(others)}")
    return ["from typing import Any", "", *lines] if stock.joint else lines


def _texts(stock: Stock, card: Card) -> list[str]:
    """Texts for a pipeline that does not encode them itself."""
    if stock.joint is None:
        return []
    hide, places = stock.joint.hide, stock.components
    lines = ["", "", inspect.getsource(encode), "", inspect.getsource(hide), ""]
    if stock.joint.attention:
        lines.append(f"pipe.transformer.set_attn_processor({stock.joint.attention[1]}())")
    lines.append(f"pipe.transformer.register_forward_pre_hook({hide.__name__}, with_kwargs=True)")
    encoders = f"pipe.{places['tokenizer']}, pipe.{places['text_encoder']}"
    return [*lines, f'texts = encode(pipe, {encoders}, ["a prompt"], length={text_length(card)})']


def _value(key: str, value: Any) -> str:
    if key == "sigmas":
        return f"[1 - n / {len(value)} for n in range({len(value)})]"
    return _quoted(value)


def _quoted(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_quoted, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _summary(card: Card) -> str:
    shape, told = card.shape, card.provenance.get("student", {})
    kinds = {"text": "texts", "class": f"{shape.classes} class labels", "none": "nothing"}
    experts = sum(name != "router" for name in told.get("teachers", {}))
    origin = (
        f"distilled from the {experts} experts of a decentralized diffusion model"
        if experts
        else "trained on all the data, the measure of a decentralized diffusion model"
    )
    return (
        f"One dense model of {count(card.parameters)} parameters, {origin}. Conditioned on"
        f" {kinds[card.condition]}; latents of {shape.channels}x{shape.size}x{shape.size}. It"
        " predicts the velocity of rectified flow."
    )


def _needs(card: Card, outside: Mapping[str, tuple[str, str]]) -> str:
    packages = ["torch", "diffusers"] + (["transformers"] if card.condition == "text" else [])
    found = f"With {', '.join(packages[:-1])} and {packages[-1]}; nothing else is needed."
    if outside:
        found += f" The folder does not hold {' and '.join(outside)}, which are fetched by name."
    return found


def _remarks(card: Card) -> str:
    stock = stock_of(card.family)
    lines = [f"- {remark}" for remark in stock.remarks] + ["- Guidance of 1 or less is none."]
    if stock.limits.patch and card.latents["name"] == "none":
        lines.append(f"- Without a VAE the pipeline divides `height` and `width` by {WITHOUT_VAE}.")
    if card.condition == "none":
        lines.append("- `class_labels` says how many pictures; 1000 stands for no label.")
    elif card.condition == "class":
        lines.append(f"- Labels are 0 to {card.shape.classes - 1}; others have no meaning.")
    return "\n".join(lines)


def _training(card: Card, about: Mapping[str, Any]) -> str:
    told, init = card.provenance.get("student", {}), card.provenance.get("init", {})
    rows = [
        ["training rows", f"{card.rows:,}"],
        ["samples seen", f"{card.samples:,} in batches of {card.batch}"],
        ["training FLOPs" + (", teachers' included" if told else ""), f"{card.train_flops:.3g}"],
    ]
    if told and about.get("monolith_flops"):
        part = card.train_flops / float(about["monolith_flops"])
        rows.append(["of the monolith's FLOPs", f"{part:.3f}"])
    if told:
        who = "the expert of the sample's cluster"
        rows.append(["teacher", who if told["teacher"] == "cluster" else f"experts, {told['routing']}"])
        if told.get("data_weight"):
            rows.append(["weight of the data's loss", f"{told['data_weight']:g}"])
        rows += [[f"teacher {name}", f"`{digest}`"] for name, digest in told["teachers"].items()]
    rows.append(["started from", str(init.get("start") or init.get("kind", "scratch"))])
    rows.append(["weights before conversion", f"`{card.weights_sha256}`"])
    return table(["", ""], rows)
