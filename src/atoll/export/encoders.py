"""The frozen encoders of a pipeline: in its folder, or found by the name in the cards."""

import shutil
from collections.abc import Collection, Container
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atoll.base.errors import ConfigError
from atoll.encoders.registry import check_known, licence_of, rounded_hashes, weights_hash
from atoll.encoders.text import text_encoder
from atoll.encoders.vae import autoencoder_of
from atoll.model.card import Card, text_length
from atoll.model.checkpoint import use_default_permissions

COPIED = 2 * 10**9
"""Bytes up to which an encoder is copied into a folder without being asked for."""


def by_name(
    card: Card, there: Container[str], given: Container[str], allowed: Collection[str] = ()
) -> dict[str, Any]:
    """The encoders that neither the folder holds nor the caller gives.

    Args:
        card: of the router; says what made the latents and the text states.
        there: components that have a folder.
        given: names of the components that the caller passes, perhaps as None.
        allowed: names of encoders that the user vouches for.

    Raises:
        ConfigError: one is neither known nor allowed, cannot be found, or has other weights by now.
    """
    components: dict[str, Any] = {}
    if card.text is not None and not any(n in there or n in given for n in ("text_encoder", "tokenizer")):
        check_known(card.text["name"], allowed)
        encoder = text_encoder(card.text["name"], text_length(card))
        components = {"text_encoder": encoder.network, "tokenizer": encoder.tokenizer}
    if card.latents["name"] != "none" and "vae" not in there and "vae" not in given:
        check_known(card.latents["name"], allowed)
        components["vae"] = autoencoder_of(card.latents).network
    return components


def check_encoders(card: Card, tower: nn.Module | None, vae: nn.Module | None) -> None:
    """Refuse an encoder that is not the one of the training.

    One that was saved in 16 bits is held against the hash of the training's in as many.

    Raises:
        ConfigError: says which, and by what name the right one is known.
    """
    if tower is not None and card.text is None:
        raise ConfigError("this model takes no text", "leave text_encoder out")
    if tower is not None:
        _check("text encoder", tower, card.text or {})
    if vae is not None:
        _check("VAE", vae, card.latents)


def _check(what: str, network: nn.Module, producer: dict[str, Any]) -> None:
    if weights_hash(network) == producer["hash"]:
        return
    rounded = producer.get("rounded") or {}
    if not any(rounded.get(kind) == value for kind, value in rounded_hashes(network).items()):
        raise ConfigError(
            f"this {what} is not the one of the training, {producer['name']!r}", "install that one"
        )


def may_be_copied(name: str, size: int) -> str | None:
    """Why an encoder is not copied into a folder without being asked for; None if it is.

    Args:
        name: of the encoder.
        size: bytes of its weights.
    """
    if licence_of(name) is None:
        return "its licence is not known to Atoll"
    return f"it has {size / 1e9:.1f} GB" if size > COPIED else None


def size_of(network: nn.Module) -> int:
    """Bytes of the weights."""
    return sum(p.numel() * p.element_size() for p in network.parameters())


def cast(network: nn.Module | None, kind: torch.dtype) -> None:
    """Change the type of the numbers, but of the layers that a class keeps in float32 (T5's, say)."""
    if network is None:
        return
    kept = getattr(network, "_keep_in_fp32_modules", None) or ()
    for name, module in network.named_modules():
        if not any(part in kept for part in name.split(".")):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(kind)


def plain(module: Any) -> Any:
    """The module that `torch.compile` has wrapped."""
    return getattr(module, "_orig_mod", module)


def save_component(root: Path, name: str, component: Any) -> None:
    """Write a component beside its place and put it there: what is saved may be mapped from the old files."""
    target, new = root / name, root / f".{name}.new"
    shutil.rmtree(new, ignore_errors=True)
    if component is not None:
        plain(component).save_pretrained(str(new))
    shutil.rmtree(target, ignore_errors=True)
    if component is not None:
        use_default_permissions(new)
        new.rename(target)
