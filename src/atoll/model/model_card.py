"""The model card, README.md: what the cards of the parts and the campaign say, in a template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.base.markdown import Markdown, code, render
from atoll.base.text import count, sharing_sentence
from atoll.encoders.registry import licence_of
from atoll.model.card import Card

PAPER = "Decentralized Diffusion Models (McAllister, Tancik, Song, Kanazawa, arXiv 2501.05450)"
UNKNOWN = "not stated"
MISSING = Markdown("**missing**")
CALLS = {"text": '"a prompt", ', "class": "class_labels=[0], ", "none": ""}


def model_card(
    router: Card,
    experts: Mapping[int, Card],
    k: int,
    about: Mapping[str, Any],
    defaults: Mapping[str, Any],
    picture: bool,
    name: str = "FOLDER",
) -> str:
    """Write the text of README.md, with the hub's metadata at its head.

    Args:
        router: its card.
        experts: cards of the experts that are there, by number.
        k: number of clusters.
        about: what the cards do not say: `name`, `data`, `partition`, `monolith`, `evaluation`, `picture`,
            `signed` (key that signed each part, or None). Everything is optional, and what is missing is
            said to be missing.
        defaults: `num_inference_steps`, `guidance_scale`, `routing` of a call that names none.
        picture: whether `picture.png` lies beside it.
        name: how the snippet calls the folder.
    """
    return render(
        "ensemble.md",
        "atoll.model",
        **shared_facts(router, about, picture),
        experts=experts,
        k=k,
        parameters=count(sum(card.parameters for card in experts.values())),
        router_parameters=count(router.parameters),
        missing=listed([number for number in range(k) if number not in experts]),
        caption=_caption(about.get("picture") or {}),
        call=CALLS[router.condition],
        defaults=defaults,
        name=name,
        in_common=_in_common(router, experts, about),
        expert_rows=[_expert_row(number, experts.get(number)) for number in range(k)],
        compute=_compute(router, experts, about),
        signatures=[[part, code(key or "unsigned")] for part, key in (about.get("signed") or {}).items()],
    )


def shared_facts(card: Card, about: Mapping[str, Any], picture: bool) -> dict[str, Any]:
    """What `card.md` tells of any model.

    Args:
        card: of the router, or of one network.
        about: see `model_card`.
        picture: whether there is one.
    """
    shape, evaluation = card.shape, about.get("evaluation")
    conditions = {"text": "texts", "class": f"{shape.classes} class labels", "none": "nothing"}
    rows = evaluation["rows"] if evaluation else []
    return {
        "card": card,
        "about": {"licence": None, "name": None, "evaluation": None, **about},
        "picture": picture,
        "paper": PAPER,
        "version": card.provenance.get("atoll"),
        "condition": conditions[card.condition],
        "latents": ", ".join(f"{shape.channels}x{height}x{width}" for height, width in shape.latents),
        "data": _data(card, about),
        "evaluation": [[row["name"], f"{row['distance']:.4g}"] for row in rows],
        "encoders": _encoders(card),
        "licences": _licences(card, about),
    }


def _caption(picture: Mapping[str, Any]) -> str:
    words = {"steps": "{} steps", "guidance": "guidance {}", "routing": "routing {}", "seed": "seed {}"}
    settings = [form.format(picture[key]) for key, form in words.items() if key in picture]
    prompts = [f"“{prompt}”" for prompt in picture.get("prompts", [])]
    return (", ".join([*prompts, *settings]) or "Samples of this ensemble") + "."


def _expert_row(number: int, card: Card | None) -> list[Any]:
    if card is None:
        return [number, MISSING, *[""] * 6]
    numbers = [count(card.parameters), f"{card.rows:,}", f"{card.samples:,}", f"{card.train_flops:.3g}"]
    start = card.provenance.get("init", {}).get("kind", "")
    return [number, card.family, f"{card.prediction}, {card.schedule}", *numbers, start]


def _data(card: Card, about: Mapping[str, Any]) -> list[list[Any]]:
    data, cut = about.get("data") or {}, about.get("partition") or {}
    encoder = cut.get("encoder") or {}
    how = f"{cut['method']} on features of {encoder.get('name')}" if encoder else cut.get("method", UNKNOWN)
    return [
        ["source", data.get("source", UNKNOWN)],
        ["rows", f"{data['rows']:,}" if "rows" in data else UNKNOWN],
        ["training rows by cluster", ", ".join(f"{n:,}" for n in cut.get("sizes", [])) or UNKNOWN],
        ["clustering", how],
        ["partition", code(card.partition)],
        *([f"cluster {k}", told] for k, told in data.get("clusters", {}).items()),
        *([["drawn by weight", code(json.dumps(data["weights"]))]] if "weights" in data else []),
    ]


def _in_common(router: Card, experts: Mapping[int, Card], about: Mapping[str, Any]) -> str:
    shared = float(about.get("pretrain_flops") or 0.0)
    spent = shared + router.train_flops + sum(card.train_flops for card in experts.values())
    kinds = {card.provenance.get("init", {}).get("kind") for card in experts.values()}
    return sharing_sentence(shared / spent if spent else 0.0, "checkpoint" in kinds)


def _compute(router: Card, experts: Mapping[int, Card], about: Mapping[str, Any]) -> list[list[str]]:
    spent = {"experts": sum(card.train_flops for card in experts.values()), "router": router.train_flops}
    if about.get("pretrain_flops"):
        spent["shared pretraining"] = float(about["pretrain_flops"])
    spent["together"] = sum(spent.values())
    for role, what in (("monolith", "the monolith it is compared with"), ("student", "a student of it")):
        if about.get(f"{role}_flops"):
            spent[what] = float(about[f"{role}_flops"])
    return [[name, f"{value:.3g}"] for name, value in spent.items()]


def _encoders(card: Card) -> list[list[Any]]:
    named = {"latents": card.latents, "text": card.text}
    return [
        [what, encoder["name"], code(encoder["hash"] or "-")] for what, encoder in named.items() if encoder
    ]


def _licences(card: Card, about: Mapping[str, Any]) -> list[list[Any]]:
    data = about.get("data") or {}
    rows = [
        ["these weights", about.get("licence") or f"{UNKNOWN}: ask whoever trained them"],
        ["data", data.get("licence") or UNKNOWN],
    ]
    for what, encoder in (("VAE", card.latents), ("text encoder", card.text)):
        if encoder and encoder["name"] != "none":
            rows.append([f"{what} {encoder['name']}", licence_of(encoder["name"]) or UNKNOWN])
    return rows


def listed(numbers: Sequence[int]) -> str:
    """Numbers for a sentence."""
    return ", ".join(map(str, numbers))
