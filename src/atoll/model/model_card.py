"""The model card, README.md: what the cards of the parts and the campaign say, in a template."""

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.base.markdown import render
from atoll.base.text import count, sharing_sentence
from atoll.encoders.registry import licence_of
from atoll.model.card import Card

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
        about: facts as `model_card_facts` gives them, `picture`, and `signed` (key by part); all optional.
        defaults: `num_inference_steps`, `guidance_scale`, `routing` of a call that names none.
        name: how the snippet calls the folder.
    """
    # The picture's caption: its prompts and how it was drawn.
    drawn = about.get("picture") or {}
    words = {"steps": "{} steps", "guidance": "guidance {}", "routing": "routing {}", "seed": "seed {}"}
    caption = [f"“{prompt}”" for prompt in drawn.get("prompts", [])]
    caption += [form.format(drawn[key]) for key, form in words.items() if key in drawn]

    # Compute: what the ensemble took, of which the experts shared a part, and what it is compared with.
    trained = sum(card.train_flops for card in experts.values())
    shared = float(about.get("pretrain_flops") or 0)
    together = trained + router.train_flops + shared
    # Islands may have checkpoints of their own, or none.
    starts = {number: card.provenance.get("init", {}) for number, card in experts.items()}
    kinds, weights = ({str(init.get(key)) for init in starts.values()} for key in ("kind", "weights_sha256"))
    one = kinds == {"checkpoint"} and len(weights) == 1
    return render(
        "ensemble.md",
        "atoll.model",
        **shared_facts(router, about, picture),
        experts=experts,
        k=k,
        parameters=count(sum(card.parameters for card in experts.values())),
        missing=listed([number for number in range(k) if number not in experts]),
        caption=(", ".join(caption) or "Samples of this ensemble") + ".",
        call=CALLS[router.condition],
        defaults=defaults,
        name=name,
        in_common=sharing_sentence(shared / together if together else 0.0, one, bool(about.get("origin"))),
        starts=starts,
        compute={
            "experts": trained,
            "router": router.train_flops,
            "shared pretraining": shared,
            "together": together,
            "the monolith it is compared with": about.get("monolith_flops"),
            "a student of it": about.get("student_flops"),
        }.items(),
    )


def shared_facts(card: Card, about: Mapping[str, Any], picture: bool) -> dict[str, Any]:
    """What `card.md` needs of any model; `card` is the router's, or of one network."""
    shape = card.shape
    conditions = {"text": "text", "class": f"{shape.classes} class labels", "none": "nothing"}
    return {
        "card": card,
        "about": {"licence": None, "name": None, "evaluation": None, "signed": None, **about},
        "data": about.get("data") or {},
        "partition": about.get("partition") or {},
        "picture": picture,
        "version": card.provenance.get("atoll"),
        "condition": conditions[card.condition],
        "latents": ", ".join(f"{shape.channels}x{height}x{width}" for height, width in shape.latents),
        "licence_of": licence_of,
        "unknown": "not stated",
    }


def listed(numbers: Sequence[int]) -> str:
    """Numbers for a sentence."""
    return ", ".join(map(str, numbers))
