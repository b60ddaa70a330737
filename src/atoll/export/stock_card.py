"""README.md of a stock diffusers pipeline: how it is run, and where it comes from."""

import inspect
import json
from collections.abc import Mapping
from typing import Any

from atoll.base.markdown import code, render
from atoll.base.text import count
from atoll.export.stock import WITHOUT_VAE, Stock, stock_of
from atoll.export.stock_run import encode, unpacked
from atoll.model.card import Card, text_length
from atoll.model.model_card import shared_facts


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
    student = card.provenance.get("student", {})
    return render(
        "stock.md",
        "atoll.export",
        "atoll.model",
        **shared_facts(card, about, picture),
        parameters=count(card.parameters),
        experts=sum(part != "router" for part in student.get("teachers", {})),
        stock=stock_of(card.family),
        without_vae=WITHOUT_VAE,
        outside=outside,
        snippet=snippet(card, defaults, outside, factor, name),
        training=_training(card, about),
    )


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
    given = [f"{part}={kind}.from_pretrained({_quoted(where)})" for part, (kind, where) in outside.items()]
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
    return "\n".join(lines)


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
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _training(card: Card, about: Mapping[str, Any]) -> list[list[Any]]:
    student, init = card.provenance.get("student", {}), card.provenance.get("init", {})
    rows: list[list[Any]] = [
        ["training rows", f"{card.rows:,}"],
        ["samples seen", f"{card.samples:,} in batches of {card.batch}"],
        ["training FLOPs" + (", teachers' included" if student else ""), f"{card.train_flops:.3g}"],
    ]
    if student and about.get("monolith_flops"):
        part = card.train_flops / float(about["monolith_flops"])
        rows.append(["of the monolith's FLOPs", f"{part:.3f}"])
    if student:
        who = "the expert of the sample's cluster"
        rows.append(["teacher", who if student["teacher"] == "cluster" else f"experts, {student['routing']}"])
        if student.get("data_weight"):
            rows.append(["weight of the data's loss", f"{student['data_weight']:g}"])
        rows += [[f"teacher {name}", code(digest)] for name, digest in student["teachers"].items()]
    rows.append(["started from", init.get("start") or init.get("kind", "scratch")])
    rows.append(["weights before conversion", code(card.weights_sha256)])
    return rows
