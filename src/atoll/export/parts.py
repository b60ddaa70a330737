"""One network in a folder of its own: checked before it is read, read, and written again."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import nn

from atoll.base.errors import AtollError, StoreError
from atoll.base.hashing import digest, digest_tensors
from atoll.ensemble.card import Card
from atoll.ensemble.expert import read_card, read_part, settings_of
from atoll.ensemble.stored import FileWeights
from atoll.networks.checkpoint import WEIGHTS
from atoll.store.store import Store, to_json

CARD, CONFIG = "card.json", "config.json"
FILES = (CONFIG, WEIGHTS, CARD)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
AGAIN = "fetch or export the folder again"
Part = TypeVar("Part")


def check_part(folder: Path) -> Card:
    """What can be told of a network's folder without reading its weights.

    Returns:
        Its card.

    Raises:
        StoreError: a file is missing, the weights are pickle or torn, or the card is of another version.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder} is missing", AGAIN)
    refuse_pickle(folder)
    for name in FILES:
        if not (folder / name).is_file():
            raise StoreError(f"{folder / name} is missing", AGAIN)
    check_safetensors(folder / WEIGHTS)
    return read_card(Store.open(folder), ".")


def refuse_pickle(folder: Path) -> None:
    """Refuse a folder whose weights are pickle only: reading one runs whatever code it holds."""
    names = sorted(os.listdir(folder))
    pickles = [name for name in names if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in names):
        raise StoreError(
            f"{folder / pickles[0]} is pickle, which is not read", "convert the weights to safetensors"
        )


def check_safetensors(path: Path) -> None:
    """Refuse a file that is no safetensors or has not the size of its header; reads the header only."""
    with path.open("rb") as file:
        if file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            raise StoreError(f"{path} is pickle, not safetensors", "convert the weights to safetensors")
    try:
        FileWeights(path)
    except StoreError as error:
        raise StoreError(error.what, AGAIN) from None


def load_part(folder: Path, load: Callable[[Store, str], Part]) -> Part:
    """Load a network with `Expert.load` or `RouterModel.load`; every byte is held against its card.

    Raises:
        StoreError: a file is not what the card says.
    """
    try:
        return load(Store.open(folder), ".")
    except StoreError as error:
        raise StoreError(error.what, AGAIN) from None


def save_part(folder: Path, network: nn.Module, card: Card) -> Card:
    """Write a network with its card, `card.json` last; what lies there unchanged is left alone.

    Returns:
        The card as written: weights that were changed since (another type of numbers, say) have another
        digest.
    """
    weights = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    settings = settings_of(network)
    found = {"config_sha256": digest(settings), "weights_sha256": digest_tensors(weights)}
    if found["weights_sha256"] != card.weights_sha256:
        kinds = sorted({str(value.dtype).removeprefix("torch.") for value in weights.values()})
        card = card.model_copy(update={"provenance": {**card.provenance, "saved_as": ", ".join(kinds)}})
    card = card.model_copy(update=found)
    if _holds(folder, card):
        return card
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CARD).unlink(missing_ok=True)
    (folder / CONFIG).write_bytes(to_json(settings))
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    as_others_are(folder)
    (folder / CARD).write_bytes(to_json(card.to_json()))
    return card


def as_others_are(folder: Path) -> None:
    """Give all files the permissions of a new file; safetensors' own can be read by nobody else."""
    with tempfile.TemporaryDirectory() as scratch:
        like = Path(scratch) / "file"
        like.touch()
        for path in folder.rglob("*"):
            if path.is_file():
                shutil.copymode(like, path)


def _holds(folder: Path, card: Card) -> bool:
    """Whether this very network lies there, whole."""
    try:
        return check_part(folder) == card and read_part(Store.open(folder), ".")[0] == card
    except AtollError:
        return False


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
        as_others_are(new)
        new.rename(target)
