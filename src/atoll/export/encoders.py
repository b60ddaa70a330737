"""The frozen encoders of a pipeline: in its folder, or found by the name in the cards."""

import shutil
from collections.abc import Collection, Container, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn

from atoll.base.console import say
from atoll.base.errors import ConfigError, StoreError, first_line
from atoll.encoders.registry import check_known, is_that_of, licence_of, text_parts, with_tokenizers
from atoll.encoders.text import text_encoder
from atoll.encoders.vae import autoencoder_of
from atoll.model.card import Card
from atoll.model.checkpoint import use_default_permissions
from atoll.model.folder import OTHERS

Copied = Literal["auto", "copy", "name"]
LARGEST = 2 * 10**9
"""Bytes up to which an encoder is copied into a folder without being asked for."""


def by_name(
    card: Card, there: Container[str] = (), given: Container[str] = (), allowed: Collection[str] = ()
) -> dict[str, Any]:
    """The encoders that neither the folder (`there`) holds nor the caller gives, perhaps as None.

    `ConfigError` where one is neither known nor `allowed`, cannot be found, or has other weights by now.
    """
    components, parts = dict[str, Any](), text_parts(card.text)
    # Of several the folder may hold some: small ones are copied, and those of known licence.
    outside = [p for p in parts if not any(n in there or n in given for n in with_tokenizers([p]))]
    for part in outside:
        check_known(parts[part]["name"], allowed)
    for part in outside:
        (tower,) = text_encoder(parts[part]["name"]).towers
        components |= zip(with_tokenizers([part]), (tower.network, tower.tokenizer), strict=True)
    if card.latents["name"] != "none" and "vae" not in there and "vae" not in given:
        check_known(card.latents["name"], allowed)
        components["vae"] = autoencoder_of(card.latents).network
    return components


def check_encoders(card: Card, components: Mapping[str, Any]) -> None:
    """Refuse an encoder that is not the one of the training, by the name under which that is known."""
    parts = text_parts(card.text)
    for name, tower in components.items():
        if name.startswith("text_encoder") and name not in parts and tower is not None:
            takes = "so many text encoders" if parts else "text"
            raise ConfigError(f"this model takes no {takes}", f"leave {name} out")
    texts = [("text encoder", components.get(name), producer) for name, producer in parts.items()]
    for part, network, producer in (*texts, ("VAE", components.get("vae"), card.latents)):
        # The states of another encoder look alike and mean something else: pictures would only be worse.
        if network is not None and not is_that_of(network, producer):
            what = f"this {part} is not the one of the training, {producer['name']!r}"
            raise ConfigError(what, "install that one")


def copy_encoders(
    root: Path, card: Card, how: Copied, components: Mapping[str, Any], places: Mapping[str, str]
) -> dict[str, list[str | None]]:
    """Write the encoders that go along; library and class of each for `model_index.json`, None outside.

    `places` are folders by component; `card` says what made latents and text states.
    """
    result: dict[str, list[str | None]] = {}
    for name in OTHERS[1:]:  # an earlier export's copy would go along, perhaps against its licence
        shutil.rmtree(root / name, ignore_errors=True)
    for name in ("vae", *with_tokenizers(text_parts(card.text))):
        part = name.replace("tokenizer", "text_encoder")
        producer = {**text_parts(card.text), "vae": card.latents}.get(part, {"name": "none"})
        component, place, network = components.get(name), root / places.get(name, name), components.get(part)
        size = 0 if network is None else sum(p.numel() * p.element_size() for p in network.parameters())
        outside = "asked for" if how == "name" else None
        if how == "auto" and licence_of(producer["name"]) is None:
            outside = "its licence is not known to Atoll"
        elif how == "auto" and size > LARGEST:
            outside = f"it has {size / 1e9:.1f} GB"
        result[name] = [None, None]
        if component is not None and outside is None:
            try:
                component.save_pretrained(str(place))
                use_default_permissions(place)
            except (OSError, SafetensorError) as error:
                what = f"cannot write {place}: {first_line(error)}"
                raise StoreError(what, "check free space and permissions") from None
            result[name] = ["diffusers" if name == "vae" else "transformers", type(component).__name__]
        elif producer["name"] != "none" and name == part:
            say(f"  {name} stays outside ({outside}): it will be looked for as {producer['name']!r}")
    return result


def cast(network: nn.Module | None, kind: torch.dtype) -> None:
    """Change the type of the numbers, but of the layers that a class keeps in float32 (T5's, say)."""
    if network is None:
        return
    # T5's outer projections overflow in half precision. transformers spares them too, but only at a load.
    kept = getattr(network, "_keep_in_fp32_modules", None) or ()
    for name, module in network.named_modules():
        if not any(part in kept for part in name.split(".")):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(kind)
