"""A checkpoint: a network in a folder, with `config.json`, weights as safetensors, and `card.json`.

A low-rank change of a network (LoRA) is one too: its file holds the change alone, and its card names the file
of the network, which lies once beside all that change it.

Expert, router, shared pretraining, monolith, student, and every part of an ensemble are this. The card is
written last and names both other files by hash, so what has no card does not exist, and what is read is what
was published. Each read hashes the weights' file once.
"""

import posixpath
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from atoll.base.errors import AtollError, StoreError
from atoll.base.hashing import digest, sha256
from atoll.base.safe_parse import read_json
from atoll.model.card import REMEDY, WEIGHTS, Card
from atoll.store.signatures import SIGNATURE, check_trusted
from atoll.store.store import Store

if TYPE_CHECKING:  # what is published is seen without torch; networks are read with it
    import torch
    from torch import Tensor, nn

    from atoll.model.expert import Expert, FileWeights, RouterModel, StoredExpert
    from atoll.networks.router import Router

CARD, CONFIG = "card.json", "config.json"
FILES = (CONFIG, WEIGHTS, CARD)
BASES = ("base", "pretrain", "init")
"""Folders beside a change where the network may lie: two of an ensemble's experts, and one of an island."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


# Networks that changes in use share, by digest: K changes open, hash and keep one.
_opened: "WeakValueDictionary[str, FileWeights]" = WeakValueDictionary()


@dataclass(frozen=True)
class Checkpoint:
    """A network in a folder of a store; nothing is read before it is asked for.

    All that read raise `StoreError` if a file is missing, damaged, or not the one that the card names.
    """

    store: Store
    prefix: str = "."
    card_sha256: str | None = None  # of the card's file, where a manifest names it

    @classmethod
    def of_run(cls, store: Store, name: str) -> "Checkpoint":
        """What a run on all the data published in a campaign; `StoreError` if it has not yet."""
        checkpoint = cls(store, f"{name}/expert")
        if not checkpoint.published:
            fix = f"train it: atoll train {name} {store.location}"
            raise StoreError(f"{store.location} has no {name} yet", fix)
        return checkpoint

    @property
    def published(self) -> bool:
        """Whether its card is there."""
        return self.store.exists(f"{self.prefix}/{CARD}")

    @cached_property
    def card(self) -> Card:
        """What the network is."""
        key = f"{self.prefix}/{CARD}"
        if self.card_sha256 is None:
            return Card.read(self.store, key)
        data, content = self.store.get(key), None
        if sha256(data) != self.card_sha256:
            raise StoreError(f"{self.store.name(key)} is not the one that the manifest names", REMEDY)
        with suppress(ValueError):  # a stranger's manifest may name anything
            content = read_json(data)
        return Card.of_json(content, self.store.name(key))

    def config(self) -> dict[str, Any]:
        """Class and arguments of the network."""
        from atoll.model.expert import check_shape

        config: dict[str, Any] = self.store.get_json(f"{self.prefix}/{CONFIG}")
        # By content and not by bytes: a config that only was formatted anew is the same.
        if digest(config) != self.card.config_sha256:
            raise self._foreign(CONFIG)
        check_shape(self.card, config, self.store.name(f"{self.prefix}/{CARD}"))
        return config

    def read(self) -> "tuple[dict[str, Any], dict[str, Tensor]]":
        """Settings and weights, those of the network that it changes too."""
        stored = self.open_lazily()
        return dict(stored.config), {**stored.base, **stored.weights}

    def base(self) -> "FileWeights | None":
        """Weights of the network that this one is a change of; None of a whole network."""
        return self.beside(self.card.base) if self.card.base else None

    def beside(self, sha: str) -> "FileWeights":
        """Weights of the network of this digest, which lies beside this one."""
        from atoll.model.expert import FileWeights

        if (opened := _opened.get(sha)) is not None:
            return opened
        parent = posixpath.dirname(self.prefix)
        for folder in BASES:
            key = posixpath.join(parent, folder, WEIGHTS)
            if self.store.exists(key):
                weights = FileWeights(self.store.path(key))
                if weights.sha256() == sha:
                    _opened[sha] = weights
                    return weights
        what = f"{self.card.title} is a change (LoRA) of a network ({sha[:12]})"
        where = " or ".join(self.store.name(posixpath.join(parent, folder)) for folder in BASES)
        raise StoreError(f"{what} that does not lie in {where}", "put its own there")

    def network(self) -> "nn.Module":
        """The network with its weights, frozen."""
        return self.open_lazily().filled()

    def expert(self, device: "torch.device | str" = "cpu", dtype: "torch.dtype | None" = None) -> "Expert":
        """The network as a denoiser."""
        from torch import nn

        from atoll.model.expert import Expert

        # Not the class's own `to`, which warns of every change of type.
        card, network = self.card, nn.Module.to(self.network(), device, dtype)
        return Expert(network, card.family, card.prediction, card.schedule, card)

    def router(
        self, device: "torch.device | str" = "cpu", dtype: "torch.dtype | None" = None
    ) -> "RouterModel":
        """The network as a router."""
        from atoll.model.expert import RouterModel

        return RouterModel(cast("Router", self.network()).to(device, dtype), self.card)

    def open_lazily(self) -> "StoredExpert":
        """An expert whose weights are hashed now and read when they are wanted."""
        from atoll.model.expert import FileWeights, StoredExpert

        card, key = self.card, f"{self.prefix}/{WEIGHTS}"
        path = self.store.path(key)
        weights = FileWeights(path)
        if (hashed := weights.sha256()) != card.weights_sha256 and self.store.local is None:
            path.unlink(missing_ok=True)  # the copy here may be damaged where the object is not
            weights = FileWeights(self.store.path(key))
            hashed = weights.sha256()
        if hashed != card.weights_sha256:
            raise self._foreign(WEIGHTS)
        how = card.family, card.prediction, card.schedule
        return StoredExpert(self.config(), *how, weights, card, self.base() or {})

    def write(self, network: "nn.Module", weights: "Mapping[str, Tensor]", card: Card) -> Card:
        """Publish a network: settings and weights first, read back, then `card.json`, or `Conflict`."""
        from atoll.model.expert import settings_of

        return self._write(settings_of(network), _blocks(weights), card)

    def save(self, network: "nn.Module", card: Card) -> Card:
        """Write a network over an earlier one; the same one that lies there is left alone."""
        from atoll.model.expert import settings_of
        from atoll.networks.lora import own

        weights, settings = own(network, network.state_dict()), settings_of(network)
        data = serialised(weights)
        # A pipeline may have been moved to 16 bits since: its card says so, and names other weights.
        digests = {"config_sha256": digest(settings), "weights_sha256": sha256(data)}
        if card.weights_sha256 not in ("", digests["weights_sha256"]):
            kinds = sorted({str(value.dtype).removeprefix("torch.") for value in weights.values()})
            card = card.model_copy(update={"provenance": {**card.provenance, "saved_as": ", ".join(kinds)}})
        card = card.model_copy(update=digests)
        if not self.holds(card):
            self.store.delete(f"{self.prefix}/{CARD}", f"{self.prefix}/{SIGNATURE}")
            self._write(settings, [data], card)
        return card

    def copy(self, target: "Checkpoint") -> Card:
        """Copy the folder, its card last; the same network that lies there is left alone."""
        card = self.card
        if not target.holds(card):
            # Weights that are damaged are told here, and not when somebody samples. What is hashed is what is
            # written: a file that is replaced meanwhile does no harm.
            weights = self.store.get(f"{self.prefix}/{WEIGHTS}")
            if sha256(weights) != card.weights_sha256:
                raise self._foreign(WEIGHTS)
            self.config()
            target.__dict__.pop("card", None)
            # A card beside files of two networks would say that they are whole.
            target.store.delete(f"{target.prefix}/{CARD}")
            for file in FILES:
                data = weights if file == WEIGHTS else self.store.get(f"{self.prefix}/{file}")
                target.store.put(f"{target.prefix}/{file}", data)
        # The bytes that were signed are the same there; a signature of an earlier network must not stay.
        mine, other = f"{self.prefix}/{SIGNATURE}", f"{target.prefix}/{SIGNATURE}"
        signature = self.store.get(mine) if self.store.exists(mine) else None
        if signature is None:
            target.store.delete(other)
        elif not target.store.exists(other) or target.store.get(other) != signature:
            target.store.put(other, signature)
        return card

    def check_trusted(self, trusted: Collection[str]) -> None:
        """Refuse a network that none of these keys signed; see `signatures.check_trusted`."""
        check_trusted(self.store, self.prefix, trusted, {WEIGHTS: self.card.weights_sha256})

    def holds(self, card: Card) -> bool:
        """Whether the network of this very card lies here, whole."""
        try:
            return self.card == card and self.open_lazily().card == card
        except AtollError:
            return False

    def check(self) -> Card:
        """Refuse a local folder from outside by its files and headers; the weights are not read."""
        assert self.store.local is not None
        folder = self.store.local / self.prefix
        if not folder.is_dir():
            raise StoreError(f"{folder} is missing", REMEDY)
        for path in sorted(folder.iterdir()):
            if path.suffix in PICKLES:
                raise StoreError(f"{path} is pickle, which is not read", "convert the weights to safetensors")
        for name in FILES:
            if not (folder / name).is_file():
                raise StoreError(f"{folder / name} is missing", REMEDY)
        check_safetensors(folder / WEIGHTS)
        self.config()
        self.base()
        return self.card

    def _write(self, settings: dict[str, Any], blocks: "Iterable[bytes]", card: Card) -> Card:
        self.__dict__.pop("card", None)  # the one that was read before this write
        self.store.put_json(f"{self.prefix}/{CONFIG}", settings)
        _, hashed = self.store.write(f"{self.prefix}/{WEIGHTS}", blocks)
        card = card.model_copy(update={"config_sha256": digest(settings), "weights_sha256": hashed})
        # If-absent: of two processes that publish one run, the second one learns that it came too late.
        self.store.create_json(f"{self.prefix}/{CARD}", card.to_json())
        return card

    def _foreign(self, file: str) -> StoreError:
        return StoreError(f"{self.store.name(f'{self.prefix}/{file}')} is not what its card says", REMEDY)


def check_safetensors(path: Path) -> None:
    """Refuse a file that is no safetensors or has not the size of its header; reads the header only."""
    from atoll.model.expert import FileWeights

    with path.open("rb") as file:
        if file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            raise StoreError(f"{path} is pickle, not safetensors", "convert the weights to safetensors")
    FileWeights(path)


def use_default_permissions(folder: Path) -> None:
    """Give all files the permissions of a new file; safetensors' own can be read by nobody else."""
    with tempfile.TemporaryDirectory() as scratch:
        like = Path(scratch) / "file"
        like.touch()
        for path in folder.rglob("*"):
            if path.is_file():
                shutil.copymode(like, path)


def serialised(weights: "Mapping[str, Tensor]") -> bytes:
    """What the weights' file of these tensors holds."""
    return b"".join(_blocks(weights))


def _blocks(weights: "Mapping[str, Tensor]") -> "Iterator[bytes]":
    from atoll.store.tensors import to_blocks

    on_host = {name: value.detach().cpu() for name, value in weights.items()}
    return to_blocks(on_host, metadata={"format": "pt"})
