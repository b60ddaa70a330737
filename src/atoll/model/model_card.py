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
        about: what the cards do not say: `name`, `data`, `partition`, `monolith`, `evaluation`, `picture`,
            `signed` (key that signed each part, or None). Everything is optional, and what is missing is
            said to be missing.
        defaults: `num_inference_steps`, `guidance_scale`, `routing` of a call that names none.
        name: how the snippet calls the folder.
    """
    # The picture's caption: its prompts and how it was drawn.
    drawn = about.get("picture") or {}
    words = {"steps": "{} steps", "guidance": "guidance {}", "routing": "routing {}", "seed": "seed {}"}
    caption = [f"“{prompt}”" for prompt in drawn.get("prompts", [])]
    caption += [form.format(drawn[key]) for key, form in words.items() if key in drawn]

    # Compute: what the ensemble took, of which the experts shared a part, and what it is compared with.
    spent = {"experts": sum(card.train_flops for card in experts.values()), "router": router.train_flops}
    if shared := float(about.get("pretrain_flops") or 0.0):
        spent["shared pretraining"] = shared
    together = spent["together"] = sum(spent.values())
    for role, title in (("monolith", "the monolith it is compared with"), ("student", "a student of it")):
        if about.get(f"{role}_flops"):
            spent[title] = float(about[f"{role}_flops"])
    starts = {number: card.provenance.get("init", {}).get("kind", "") for number, card in experts.items()}

    rows: list[list[Any]] = []
    for number in range(k):
        card = experts.get(number)
        if card is None:
            rows.append([number, MISSING, *[""] * 6])
            continue
        sizes = [count(card.parameters), f"{card.rows:,}", f"{card.samples:,}", f"{card.train_flops:.3g}"]
        rows.append([number, card.family, f"{card.prediction}, {card.schedule}", *sizes, starts[number]])
    return render(
        "ensemble.md",
        "atoll.model",
        **shared_facts(router, about, picture),
        experts=experts,
        k=k,
        parameters=count(sum(card.parameters for card in experts.values())),
        router_parameters=count(router.parameters),
        missing=listed([number for number in range(k) if number not in experts]),
        caption=(", ".join(caption) or "Samples of this ensemble") + ".",
        call=CALLS[router.condition],
        defaults=defaults,
        name=name,
        in_common=sharing_sentence(shared / together if together else 0.0, "checkpoint" in starts.values()),
        expert_rows=rows,
        compute=[[part, f"{value:.3g}"] for part, value in spent.items()],
        signatures=[[part, code(key or "unsigned")] for part, key in (about.get("signed") or {}).items()],
    )


def shared_facts(card: Card, about: Mapping[str, Any], picture: bool) -> dict[str, Any]:
    """What `card.md` tells of any model; `card` is the router's, or of one network."""
    shape, evaluation, data = card.shape, about.get("evaluation"), about.get("data") or {}
    conditions = {"text": "texts", "class": f"{shape.classes} class labels", "none": "nothing"}
    partition = about.get("partition") or {}
    method = partition.get("method", UNKNOWN)
    if encoder := partition.get("encoder"):
        method = f"{method} on features of {encoder.get('name')}"
    encoders = {"VAE": card.latents, "text encoder": card.text}
    licences = [
        [f"{kind} {by['name']}", licence_of(by["name"]) or UNKNOWN]
        for kind, by in encoders.items()
        if by and by["name"] != "none"
    ]
    return {
        "card": card,
        "about": {"licence": None, "name": None, "evaluation": None, **about},
        "picture": picture,
        "paper": PAPER,
        "version": card.provenance.get("atoll"),
        "condition": conditions[card.condition],
        "latents": ", ".join(f"{shape.channels}x{height}x{width}" for height, width in shape.latents),
        "data": [
            ["source", data.get("source", UNKNOWN)],
            ["rows", f"{data['rows']:,}" if "rows" in data else UNKNOWN],
            ["training rows by cluster", ", ".join(f"{n:,}" for n in partition.get("sizes", [])) or UNKNOWN],
            ["clustering", method],
            ["partition", code(card.partition)],
            *([f"cluster {k}", content] for k, content in data.get("clusters", {}).items()),
            *([["drawn by weight", code(json.dumps(data["weights"]))]] if "weights" in data else []),
        ],
        "evaluation": [[row["name"], f"{row['distance']:.4g}"] for row in (evaluation or {}).get("rows", [])],
        "encoders": [
            [kind, by["name"], code(by["hash"] or "-")]
            for kind, by in {"latents": card.latents, "text": card.text}.items()
            if by
        ],
        "licences": [
            ["these weights", about.get("licence") or f"{UNKNOWN}: ask whoever trained them"],
            ["data", data.get("licence") or UNKNOWN],
            *licences,
        ],
    }


def listed(numbers: Sequence[int]) -> str:
    """Numbers for a sentence."""
    return ", ".join(map(str, numbers))
