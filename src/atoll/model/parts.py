"""One network in a folder of its own: checked before it is read, read, and written again."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch import nn

from atoll.base.errors import AtollError, StoreError
from atoll.base.hashing import digest, digest_tensors
from atoll.model.card import Card
from atoll.model.expert import read_card, read_part, settings_of, write_part
from atoll.model.stored import FileWeights
from atoll.networks.checkpoint import WEIGHTS
from atoll.store.signatures import SUFFIX
from atoll.store.store import Store

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
    pickles = sorted(path for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise StoreError(f"{pickles[0]} is pickle, which is not read", "convert the weights to safetensors")
    for name in FILES:
        if not (folder / name).is_file():
            raise StoreError(f"{folder / name} is missing", AGAIN)
    check_safetensors(folder / WEIGHTS)
    return read_card(Store.open(folder), ".")


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


def save_part(store: Store, prefix: str, network: nn.Module, card: Card) -> Card:
    """Write a network with its card, `card.json` last; what lies there unchanged is left alone.

    Returns:
        The card as written: weights that were changed since (another type of numbers, say) have another
        digest.
    """
    weights = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    digests = {"config_sha256": digest(settings_of(network)), "weights_sha256": digest_tensors(weights)}
    if digests["weights_sha256"] != card.weights_sha256:
        kinds = sorted({str(value.dtype).removeprefix("torch.") for value in weights.values()})
        card = card.model_copy(update={"provenance": {**card.provenance, "saved_as": ", ".join(kinds)}})
    card = card.model_copy(update=digests)
    if not holds(store, prefix, card):
        store.delete(f"{prefix}/{CARD}", f"{prefix}/{CARD}{SUFFIX}")
        write_part(store, prefix, network, weights, card)
    return card


def holds(store: Store, prefix: str, card: Card) -> bool:
    """Whether this very network lies there, whole."""
    try:
        return read_part(store, prefix)[0] == card
    except AtollError:
        return False


def copy_part(source: Store, prefix: str, target: Store, name: str) -> Card:
    """Copy a network, its card last; one that lies there unchanged is left alone.

    Raises:
        StoreError: a file of the source is missing, or not what its card says.
    """
    card = read_card(source, prefix)
    if not holds(target, name, card):
        read_part(source, prefix)  # damaged weights are told here, not when somebody samples
        target.delete(f"{name}/{CARD}")
        for file in FILES:
            target.put(f"{name}/{file}", source.get(f"{prefix}/{file}"))
    _copy_signature(source, f"{prefix}/{CARD}{SUFFIX}", target, f"{name}/{CARD}{SUFFIX}")
    return card


def _copy_signature(source: Store, key: str, target: Store, name: str) -> None:
    signature = source.get(key) if source.exists(key) else None
    if signature is None:
        target.delete(name)
    elif not target.exists(name) or target.get(name) != signature:
        target.put(name, signature)


def as_others_are(folder: Path) -> None:
    """Give all files the permissions of a new file; safetensors' own can be read by nobody else."""
    with tempfile.TemporaryDirectory() as scratch:
        like = Path(scratch) / "file"
        like.touch()
        for path in folder.rglob("*"):
            if path.is_file():
                shutil.copymode(like, path)
