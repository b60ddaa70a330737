"""The folder of a pipeline, as `atoll assemble`, `atoll export` and `AtollPipeline.save_pretrained` write it.

Parts that lie there unchanged are left alone. `ensemble.json` is written last and names every file that a
network, tokenizer or scheduler is read from by size and SHA-256. README.md and the picture may be edited.
"""

import importlib.metadata
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from atoll.base.errors import ConfigError, StoreError
from atoll.base.format import File
from atoll.base.hashing import sha256
from atoll.encoders.registry import with_tokenizers
from atoll.flow.settings import shift_line
from atoll.model.card import REMEDY, WEIGHTS, Card
from atoll.model.checkpoint import BASES, CARD, Checkpoint, serialised
from atoll.model.generation import Generation
from atoll.model.model_card import model_card
from atoll.model.routing import LARGEST_K, PRETRAIN
from atoll.store.manifest import FileEntry, OwnFiles, check_file, entry_of
from atoll.store.signatures import check_trusted, signer
from atoll.store.store import Store, to_json

if TYPE_CHECKING:
    from torch import nn

MANIFEST, MODEL_INDEX, README, PICTURE = "ensemble.json", "model_index.json", "README.md", "picture.png"
EXPERTS = "experts.json"
PRETRAIN_PART = f"experts/{PRETRAIN}"
PIPELINE = "AtollPipeline"
BANK = ("atoll.export.bank", "ExpertBank")
ROUTER = ("atoll.networks.router", "Router")
"""Import paths that `model_index.json` names: folders of any age are read through them, so they stay."""
OTHERS = ("scheduler", "vae", *with_tokenizers(("text_encoder", "text_encoder_2", "text_encoder_3")))
SCHEDULER = "scheduler/scheduler_config.json"
DEFAULTS = {"steps": "num_inference_steps", "guidance": "guidance_scale", "routing": "routing"}
"""Fields of `Generation`, and what a diffusers pipeline calls them."""
DYNAMIC = ("base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len")
"""Settings of a scheduler whose shift depends on the number of tokens, in the order of `shift_line`."""


class Manifest(File):
    """`ensemble.json`: what the folder holds. Written last, it says that all of it is there."""

    FORMAT, PLACE = "atoll/model", "ensemble/ensemble.json"
    REMEDY = REMEDY
    k: int = Field(ge=1, le=LARGEST_K)
    """Number of clusters."""
    experts: list[int] = Field(min_length=1)
    """Numbers of the experts that are there."""
    partition: str
    """Hash of the partition that all parts were made for."""
    parts: dict[str, str]
    """Digest of the weights of every part: `experts/K`, `router`, and `experts/pretrain` where the experts
    started from one network."""
    about: dict[str, Any] = {}
    """What the model card says beside the cards: data, partition, costs, evaluation."""
    files: OwnFiles
    """Every file that a part is read from."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.experts != sorted(set(self.experts) & set(range(self.k))):
            raise ValueError("experts are not rising numbers below k")
        if self.parts.keys() - {PRETRAIN_PART} != {"router", *(f"experts/{n}" for n in self.experts)}:
            raise ValueError("parts are not the router and the experts")
        digests = {entry.path: entry.sha256 for entry in self.files}
        for part, digest in self.parts.items():
            if f"{part}/{CARD}" not in digests or digests.get(f"{part}/{WEIGHTS}") != digest:
                raise ValueError(f"its files are not those of {part}")
        return self

    def checkpoints(
        self, store: Store, prefix: str = "", experts: Iterable[int] | None = None
    ) -> dict[str, Checkpoint]:
        """The networks of the folder by part; of the experts those with these numbers, by default all."""
        # Each is held against the manifest as it is read: the card by its digest here, and the other two
        # files by those that the card names. So files of many gigabytes are read once.
        numbers = self.experts if experts is None else experts
        names = ["router", *(f"experts/{n}" for n in numbers), *({PRETRAIN_PART} & self.parts.keys())]
        cards = {entry.path: entry.sha256 for entry in self.files}
        return {name: Checkpoint(store, f"{prefix}{name}", cards[f"{name}/{CARD}"]) for name in names}

    def check_trusted(self, store: Store, trusted: Collection[str]) -> None:
        """Refuse an exported folder that none of these keys signed."""
        check_trusted(store, "", trusted, {entry.path: entry.sha256 for entry in self.files})

    def check_indices(self, store: Store, prefix: str) -> None:
        """Hold `model_index.json` and `experts.json` against their entries, where nobody reads them."""
        # An export writes both anew, but a folder in which they are torn is no source.
        for entry in self.files:
            if entry.path in (MODEL_INDEX, f"experts/{EXPERTS}"):
                check_file(store, prefix, entry)


class ExpertIndex(File):
    """`experts/experts.json`: which experts the bank holds."""

    FORMAT, PLACE = "atoll/experts", "ensemble/experts/experts.json"
    REMEDY = REMEDY
    k: int = Field(ge=1, le=LARGEST_K)
    """Number of clusters."""
    experts: dict[str, str]
    """Digest of the weights of every expert that is there, by number, and of `pretrain`, the network of
    shared pretraining, if that is there."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if not self.experts.keys() <= {PRETRAIN, *(str(number) for number in range(self.k))}:
            raise ValueError("experts are not numbers below k")
        return self

    @property
    def numbers(self) -> list[int]:
        """Of the experts, rising."""
        return sorted(int(name) for name in self.experts if name != PRETRAIN)


def read_manifest(store: Store, prefix: str = "ensemble/") -> Manifest:
    """What `ensemble.json` says; `StoreError` if nothing was assembled, or by another version."""
    if not store.exists(f"{prefix}{MANIFEST}"):
        fix = "run 'atoll assemble' first, or 'atoll launch' if its parts are not trained yet"
        raise StoreError(f"{store.location} has no ensemble", fix)
    return Manifest.read(store, f"{prefix}{MANIFEST}")


def defaults(generation: Generation) -> dict[str, Any]:
    """What a call of the pipeline takes that says nothing else, by diffusers' names."""
    values = {name: getattr(generation, field) for field, name in DEFAULTS.items()}
    return {**values, "routing": str(generation.routing)}


def scheduler_shift(shift: float | str, patch: int = 2) -> dict[str, Any]:
    """A time shift as the settings of Euler's scheduler, for a network of patches of this side."""
    if not isinstance(shift, str):
        return {"shift": shift, "use_dynamic_shifting": False}
    low, high, few, many = shift_line(shift)
    line = zip(DYNAMIC, (low, high, few * 4 / patch**2, many * 4 / patch**2), strict=True)
    return {"use_dynamic_shifting": True, **dict(line)}


def defaults_in(index: Mapping[str, Any], scheduler: Mapping[str, Any]) -> Generation:
    """The same as `model_index.json` and the scheduler's settings have it; `StoreError` for no such value."""
    values = {field: index.get(name) for field, name in DEFAULTS.items()}
    try:
        shift = scheduler.get("shift")
        if scheduler.get("use_dynamic_shifting"):
            shift = f"tokens({', '.join(str(scheduler.get(name)) for name in DYNAMIC)})"
        return Generation().with_(**values, shift=shift)
    except ConfigError as error:
        raise StoreError(f"{MODEL_INDEX} or {SCHEDULER} has {error.what}", Manifest.REMEDY) from None


def index_entries(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Name, library and class of the components of `model_index.json` that have a folder."""
    pairs = {name: value for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {name: (str(library), str(kind)) for name, (library, kind) in pairs.items() if library is not None}


class FolderWriter:
    """Writes the folder of a pipeline: parts first, then `describe`, then `finish`."""

    def __init__(self, folder: Store, k: int) -> None:
        self.folder, self.k = folder, k
        self.cards: dict[str, Card] = {}  # of what lies there, by part
        self.base: tuple[str, Callable[[], bytes]] | None = None  # digest and bytes of what experts change
        self.entries: list[FileEntry] = []

    @property
    def parts(self) -> dict[str, str]:
        """Digest of the weights of every part, as the manifest names them."""
        named = sorted(self.cards, key=lambda part: (part == "router", len(part), part))
        return {part: self.cards[part].weights_sha256 for part in named}

    def copy(self, published: Checkpoint) -> None:
        """Copy an expert, the router or shared pretraining's network from where it was published."""
        part = part_of(published.card)
        self.cards[part] = published.copy(Checkpoint(self.folder, part))
        if (base := published.base()) is not None:
            self.base = published.card.base, base.content  # of the open file: another may lie there by then

    def save(self, network: "nn.Module", card: Card) -> Card:
        """Write one of them from memory; its card as it is now."""
        if card.base:
            from atoll.networks.lora import shared

            if self.base is None:  # its numbers may have been cast since
                data = serialised(shared(network, network.state_dict()))
                self.base = sha256(data), lambda: data
            card = card.model_copy(update={"base": self.base[0]})
        self.cards[part_of(card)] = card = Checkpoint(self.folder, part_of(card)).save(network, card)
        return card

    def scheduler(self, generation: Generation) -> tuple[str, str]:
        """Write the scheduler that pictures are drawn with; its library and class."""
        # Here, since it imports scipy.stats: a fifth of what a training process takes to start.
        from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

        scheduler = FlowMatchEulerDiscreteScheduler(**scheduler_shift(generation.shift))
        kind, kinds = type(scheduler).__name__, (str, int, float, bool, type(None))
        settings = {k: v for k, v in scheduler.config.items() if k[0] != "_" and isinstance(v, kinds)}
        self._put(SCHEDULER, to_json({"_class_name": kind, **settings}))
        return "diffusers", kind

    def describe(self, components: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
        """Write what lists the parts, remove experts that are none of them, and hash all files."""
        # diffusers wants every component of the class in the index, null where there is none.
        index = {
            "_class_name": PIPELINE,
            "_diffusers_version": importlib.metadata.version("diffusers"),
            "experts": list(BANK),
            "router": list(ROUTER),
            **{name: list(components.get(name, (None, None))) for name in OTHERS},
            **{name: generation[name] for name in DEFAULTS.values()},
        }
        self._put(MODEL_INDEX, to_json(index))
        held = {part.removeprefix("experts/"): sha for part, sha in self.parts.items() if part != "router"}
        self._put(f"experts/{EXPERTS}", to_json(ExpertIndex(k=self.k, experts=held).to_json()))

        # Experts of an earlier folder that are not among these: nobody would read them, and they are large.
        names = [*held]
        # What experts change (LoRA) lies here once: it may be shared pretraining's network, which is here.
        if self.base and held.get(PRETRAIN) != self.base[0]:
            names.append(BASES[0])
            if not self.folder.exists(key := f"experts/{BASES[0]}/{WEIGHTS}") or (
                entry_of(self.folder, ".", key).sha256 != self.base[0]
            ):
                self.folder.put(key, self.base[1]())
        own = tuple(f"experts/{name}/" for name in names)
        for key in self.folder.list("experts"):
            if key.count("/") > 1 and not key.startswith(own):
                self.folder.delete(key)
                if self.folder.local is not None:
                    with suppress(OSError):  # not empty yet
                        (self.folder.local / key).parent.rmdir()

        parts = index_entries(index)
        keys = [key for key in self.folder.list() if key == MODEL_INDEX or key.split("/")[0] in parts]
        with hashers() as pool:
            self.entries = list(pool.map(lambda key: entry_of(self.folder, ".", key), keys))

    def finish(self, about: Mapping[str, Any], picture: bytes | None = None, name: str = "FOLDER") -> None:
        """Write the model card and its picture (a PNG; None removes it), and the manifest last."""
        router = self.cards["router"]
        experts = {card.island: card for card in self.cards.values() if card.island is not None}
        if picture is None:
            self.folder.delete(PICTURE)
        else:
            self.folder.put(PICTURE, picture)
        generation = self.folder.get_json(MODEL_INDEX)
        about = {**about, "signed": {part: signer(self.folder, part) for part in self.parts}}
        card = model_card(router, experts, self.k, about, generation, picture is not None, name)
        self.folder.put(README, card.encode())
        manifest = Manifest(
            k=self.k,
            experts=sorted(experts),
            partition=router.partition,
            parts=self.parts,
            about=dict(about),
            files=self.entries,
        )
        self.folder.put_json(MANIFEST, manifest.to_json())  # last: who finds it finds all that it names

    def _put(self, path: str, data: bytes) -> None:
        if not self.folder.exists(path) or self.folder.get(path) != data:
            self.folder.put(path, data)


def hashers() -> ThreadPoolExecutor:
    """Threads that hash files side by side."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1))


def part_of(card: Card) -> str:
    """Where a network lies in the folder."""
    return {"router": "router", PRETRAIN: PRETRAIN_PART}.get(card.role, f"experts/{card.island}")
