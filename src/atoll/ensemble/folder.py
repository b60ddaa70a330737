"""The folder of an assembled ensemble: names of its files, and what the small ones hold."""

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from atoll.ensemble.card import Card

SCHEMA = 1
MODEL_INDEX, README, INDEX = "model_index.json", "README.md", "experts.json"
PIPELINE = "AtollPipeline"
BANK = ("atoll.export.bank", "ExpertBank")
ROUTER = ("atoll.networks.router", "Router")
"""Import paths that `model_index.json` names: folders of any age are read through them, so they stay."""
OTHERS = ("scheduler", "vae", "text_encoder", "tokenizer")
DEFAULTS = ("num_inference_steps", "guidance_scale", "routing")


def index(k: int, cards: Mapping[int, Card]) -> dict[str, Any]:
    """Content of `experts.json`: K, and the digest of the weights of every expert."""
    digests = {str(number): cards[number].weights_sha256 for number in sorted(cards)}
    return {"schema": SCHEMA, "k": k, "experts": digests}


def listed(numbers: Sequence[int]) -> str:
    """Numbers for a sentence."""
    return ", ".join(map(str, numbers))


def model_index(
    components: Mapping[str, Sequence[str | None]], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Content of `model_index.json`.

    Args:
        components: library and class of the scheduler, and of the encoders that have a folder.
        defaults: `num_inference_steps`, `guidance_scale` and `routing` of a call that names none.
    """
    others = {name: list(components.get(name, (None, None))) for name in OTHERS}
    return {
        "_class_name": PIPELINE,
        "_diffusers_version": importlib.metadata.version("diffusers"),
        "experts": list(BANK),
        "router": list(ROUTER),
        **others,
        **{name: defaults[name] for name in DEFAULTS},
    }
