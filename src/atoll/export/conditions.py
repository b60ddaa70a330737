"""From the arguments of a call to conditions, as training saw them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.condition import Condition
from atoll.base.errors import ConfigError
from atoll.encoders.text import TextEncoder
from atoll.ensemble.card import Card
from atoll.export.arguments import texts, whole, whole_numbers


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


def conditions(
    card: Card, asked: Asked, tokenizer: Any, tower: nn.Module | None, device: torch.device
) -> tuple[Condition, Condition, int]:
    """Conditions of all pictures, null condition (one row or as many), and the number of pictures.

    Raises:
        ConfigError: the wrong kind of condition, a label that does not exist, a text that is too long.
    """
    _check_kind(card, asked)
    if card.condition == "none":
        return Condition(), Condition(), asked.each
    if card.condition == "class":
        assert asked.class_labels is not None
        return _labels(card, asked.class_labels, asked.each, device)
    if asked.embeds is not None:
        cond, null = _given(card, asked)
    else:
        cond, null = _encoded(card, asked, tokenizer, tower, device)
    rows = _rows(cond)
    repeated = cond.map(lambda part: part.repeat_interleave(asked.each, dim=0))
    if _rows(null) > 1:
        null = null.map(lambda part: part.repeat_interleave(asked.each, dim=0))
    return repeated.to(device), null.to(device), rows * asked.each


def text_length(card: Card) -> int:
    """Most tokens of a prompt: what the encoder was set to, and what the networks were trained on."""
    assert card.text is not None
    return min(int(card.text["max_length"]), card.shape["text_length"])


def _check_kind(card: Card, asked: Asked) -> None:
    """One kind of condition, and the one the networks were trained with."""
    given = {
        "prompt": asked.prompt is not None or asked.embeds is not None,
        "class_labels": asked.class_labels is not None,
    }
    wanted = {"text": "prompt", "class": "class_labels", "none": None}[card.condition]
    for name, there in given.items():
        if there and name != wanted:
            fix = f"give {wanted}" if wanted else "leave it out: it takes no condition"
            raise ConfigError(f"this model takes no {name}", fix)
    if wanted and not given[wanted]:
        raise ConfigError(f"this model needs {wanted}", "give one or more")
    whole("num_images_per_prompt", asked.each)
    if asked.negative_prompt is not None and card.condition != "text":
        raise ConfigError("this model takes no negative_prompt", "leave it out")
    if asked.prompt is not None and asked.embeds is not None:
        raise ConfigError("both prompt and prompt_embeds were given", "give one of them")


def _labels(
    card: Card, labels: int | Sequence[int], each: int, device: torch.device
) -> tuple[Condition, Condition, int]:
    classes = card.shape["classes"]
    numbers = whole_numbers("class_labels", labels, classes)
    if not numbers:
        raise ConfigError("no class label", "give one or more")
    repeated = torch.tensor(numbers, device=device).repeat_interleave(each)
    return Condition(labels=repeated), Condition(labels=torch.tensor([classes], device=device)), len(repeated)


def _given(card: Card, asked: Asked) -> tuple[Condition, Condition]:
    """Text states that the caller encoded."""
    assert asked.embeds is not None
    pairs = [("prompt", asked.embeds, asked.mask)]
    if asked.guided:
        if asked.null_embeds is None:
            raise ConfigError(
                "guidance needs negative_prompt_embeds beside prompt_embeds",
                'give the states of "", or guidance_scale=1',
            )
        pairs.append(("negative_prompt", asked.null_embeds, asked.null_mask))
    width, found = card.shape["text_width"], []
    for name, states, mask in pairs:
        if states.ndim != 3 or states.shape[2] != width:
            raise ConfigError(f"{name}_embeds has shape {tuple(states.shape)}", f"give (N, L, {width})")
        if mask is None or mask.shape != states.shape[:2]:
            raise ConfigError(f"{name}_attention_mask does not fit {name}_embeds", "give (N, L)")
        found.append(Condition(text=states.float(), mask=mask.bool()))
    _same_number(found[-1], found[0])
    return found[0], found[-1] if asked.guided else Condition()


def _encoded(
    card: Card, asked: Asked, tokenizer: Any, tower: nn.Module | None, device: torch.device
) -> tuple[Condition, Condition]:
    """Texts through the encoder, prompts and null together."""
    if tokenizer is None or tower is None:
        name = (card.text or {}).get("name")
        raise ConfigError(
            f"the pipeline was loaded without its text encoder {name!r}", "load it, or give prompt_embeds"
        )
    assert asked.prompt is not None
    prompts = texts("prompt", asked.prompt)
    nulls = texts("negative_prompt", "" if asked.negative_prompt is None else asked.negative_prompt)
    if not prompts:
        raise ConfigError("no prompt", "give one or more")
    encoder = TextEncoder("", tokenizer, tower, text_length(card), card.shape["text_width"], device)
    if not asked.cut:
        encoder.refuse_long([*prompts, *nulls], "shorten it, or give truncate_prompt=True")
    states, mask = encoder.encode([*prompts, *nulls])
    full = Condition(text=states.clone(), mask=mask.clone())
    cond, null = full.select(slice(0, len(prompts))), full.select(slice(len(prompts), None))
    _same_number(null, cond)
    return cond, null


def _same_number(null: Condition, cond: Condition) -> None:
    if _rows(null) not in (1, _rows(cond)):
        raise ConfigError(
            f"{_rows(null)} negative prompts for {_rows(cond)} prompts", "give one for all, or one for each"
        )


def _rows(cond: Condition) -> int:
    return 0 if cond.text is None else len(cond.text)
