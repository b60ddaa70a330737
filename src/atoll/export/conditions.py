"""From the arguments of a pipeline's call to conditions, as training saw them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.export.arguments import texts, whole, whole_numbers
from atoll.model.card import Card
from atoll.model.generate import Conditions
from atoll.model.model import Model


@dataclass(frozen=True)
class Asked:
    """What a call asks for; at most one kind of condition.

    Attributes:
        prompt: one text or several.
        negative_prompt: what guidance leads away from, for all or for each; the empty text by default.
        class_labels: one label or several.
        embeds: text states `(N, L, D)` in place of texts.
        mask: which of them are real, bool `(N, L)`.
        null_embeds: states of the empty text `(1 or N, L, D)`, with `embeds`.
        null_mask: which of those are real.
        each: pictures of each condition.
        guided: whether a null condition is needed.
        cut: whether texts that are too long are cut.
    """

    prompt: str | Sequence[str] | None = None
    negative_prompt: str | Sequence[str] | None = None
    class_labels: int | Sequence[int] | None = None
    embeds: Tensor | None = None
    mask: Tensor | None = None
    null_embeds: Tensor | None = None
    null_mask: Tensor | None = None
    each: int = 1
    guided: bool = True
    cut: bool = False


def conditions(model: Model, arguments: Asked, encodes: bool) -> Conditions:
    """Conditions of all pictures.

    Args:
        model: of the pipeline's parts.
        asked: by the call.
        encodes: whether the pipeline has its text encoder.

    Raises:
        ConfigError: the wrong kind of condition, a label that does not exist, a text that is too long.
    """
    card = model.card
    _check_kind(card, arguments)
    if arguments.embeds is not None:
        return _given(card, arguments, arguments.embeds)
    if arguments.class_labels is not None:
        labels = whole_numbers("class_labels", arguments.class_labels, card.shape.classes)
        if not labels:
            raise ConfigError("no class label", "give one or more")
        return model.conditions(labels, each=arguments.each)
    if arguments.prompt is None:
        return model.conditions(each=arguments.each)
    if not encodes:
        name = (card.text or {}).get("name")
        fix = "load it, or give prompt_embeds"
        raise ConfigError(f"the pipeline was loaded without its text encoder {name!r}", fix)
    prompts = texts("prompt", arguments.prompt)
    nulls = texts("negative_prompt", "" if arguments.negative_prompt is None else arguments.negative_prompt)
    if not prompts:
        raise ConfigError("no prompt", "give one or more")
    if not arguments.cut:
        model.encoder.refuse_long([*prompts, *nulls], "shorten it, or give truncate_prompt=True")
    return model.conditions(prompts, nulls, arguments.each, cut=True)


def _check_kind(card: Card, arguments: Asked) -> None:
    """One kind of condition, and the one the networks were trained with."""
    given = {
        "prompt": arguments.prompt is not None or arguments.embeds is not None,
        "class_labels": arguments.class_labels is not None,
    }
    wanted = {"text": "prompt", "class": "class_labels", "none": None}[card.condition]
    for name, there in given.items():
        if there and name != wanted:
            fix = f"give {wanted}" if wanted else "leave it out: it takes no condition"
            raise ConfigError(f"this model takes no {name}", fix)
    if wanted and not given[wanted]:
        raise ConfigError(f"this model needs {wanted}", "give one or more")
    whole("num_images_per_prompt", arguments.each)
    if arguments.negative_prompt is not None and card.condition != "text":
        raise ConfigError("this model takes no negative_prompt", "leave it out")
    if arguments.prompt is not None and arguments.embeds is not None:
        raise ConfigError("both prompt and prompt_embeds were given", "give one of them")


def _given(card: Card, arguments: Asked, embeds: Tensor) -> Conditions:
    """Text states that the caller encoded."""
    pairs = [("prompt", embeds, arguments.mask)]
    if arguments.guided:
        if arguments.null_embeds is None:
            raise ConfigError(
                "guidance needs negative_prompt_embeds beside prompt_embeds",
                'give the states of "", or guidance_scale=1',
            )
        pairs.append(("negative_prompt", arguments.null_embeds, arguments.null_mask))
    width, parts = card.shape.text_width, []
    for name, states, mask in pairs:
        if states.ndim != 3 or states.shape[2] != width:
            raise ConfigError(f"{name}_embeds has shape {tuple(states.shape)}", f"give (N, L, {width})")
        if mask is None or mask.shape != states.shape[:2]:
            raise ConfigError(f"{name}_attention_mask does not fit {name}_embeds", "give (N, L)")
        parts.append(Condition(text=states.float(), mask=mask.bool()))
    return Conditions.of_rows(
        parts[0], parts[1] if arguments.guided else Condition(), len(embeds), each=arguments.each
    )
