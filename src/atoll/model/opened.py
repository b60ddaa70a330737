"""The folder of a pipeline opened: found or fetched, and checked before anything in it is loaded."""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch

from atoll.base.errors import AtollError, ConfigError, PartitionError, StoreError, first_line
from atoll.base.safe_parse import LARGEST, expanded, read_json, resolved
from atoll.encoders.registry import COMPONENTS, SUFFIXES, check_config
from atoll.model.card import REMEDY, Card, check_place, check_together
from atoll.model.checkpoint import BASES, CONFIG, PICKLES, Checkpoint, check_safetensors
from atoll.model.folder import (
    BANK,
    EXPERTS,
    MANIFEST,
    MODEL_INDEX,
    PICTURE,
    PIPELINE,
    PRETRAIN_PART,
    README,
    ROUTER,
    ExpertIndex,
    Manifest,
    defaults_in,
    hashers,
    index_entries,
)
from atoll.model.foreign import HUB_NAME, fetch
from atoll.model.model_card import listed
from atoll.model.routing import PRETRAIN
from atoll.store.location import is_url
from atoll.store.manifest import check_file
from atoll.store.signatures import SIGNATURE
from atoll.store.store import Store

MOST_FILES = 20_000
"""Of a part of the folder."""
Chosen = Literal["auto"] | Sequence[int]


@contextmanager
def border(name: object) -> Iterator[None]:
    """Whatever torch, diffusers, pyarrow or Python say of what a stranger handed over, as `StoreError`."""
    try:
        yield
    except (AtollError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = f"{str(name)[:300]} cannot be loaded ({first_line(error)[:200]})"
        raise StoreError(what, "fetch or export the folder again, or check the arguments") from error


@dataclass(frozen=True)
class OpenFolder:
    """What the folder of a pipeline holds, all checked."""

    root: Path
    k: int
    networks: Mapping[str, Checkpoint]  # those that were chosen, and the router, by part
    parts: Mapping[str, str]  # digests of all parts that the manifest names, chosen or not
    components: tuple[str, ...]  # names of the encoders' parts that have a folder
    about: Mapping[str, Any]


def open_folder(
    name: str | os.PathLike[str], experts: Any = "auto", trusted: Collection[str] | None = None, **hub: Any
) -> OpenFolder:
    """Find or fetch the folder of a pipeline and hold every file that will be read against its hash.

    Args:
        name: a folder, or a hub name; of a hub's, only what is needed is fetched.
        trusted: keys or certificates, one of which must have signed the folder; None takes unsigned ones too.
        hub: `revision`, `local_files_only`, `cache_dir`, `token` of huggingface_hub.

    Raises:
        ConfigError: there is no such folder, no pipeline of Atoll, or it lacks an expert.
        StoreError: a part is missing, damaged, pickle, or not what the manifest says.
        PartitionError: parts that do not belong together.
    """
    root = locate(name, experts, **hub)
    if trusted is not None:
        Manifest.read(files := Store.open(root), MANIFEST).check_trusted(files, trusted)
    return inspect_folder(root, experts)


def locate(name: str | os.PathLike[str], experts: Any, **hub: Any) -> Path:
    """The folder of a pipeline on this machine; of a hub's, only what is asked for is fetched."""
    path = expanded(name)
    if (path / "campaign.json").is_file() or (path / "campaign.yaml").is_file():
        raise ConfigError(f"{path} is a campaign", f"give its folder {path / 'ensemble'}")
    if path.is_dir():
        return path
    if "://" in str(name):
        raise ConfigError(f"{name} is a URL", "write the folder first: atoll export CAMPAIGN --to FOLDER")
    if not is_hub_name(name):
        raise ConfigError(f"there is no folder {path}", "give a folder or a hub name such as OWNER/MODEL")
    # First what says which parts there are: one expert of eight need not cost the bytes of all.
    fix, lists = "check the name, the revision and the network", [MODEL_INDEX, f"experts/{EXPERTS}"]
    root = fetch(str(name), [MANIFEST, SIGNATURE, *lists], fix, **hub)
    numbers = ExpertIndex.read(Store.open(root), f"experts/{EXPERTS}").numbers
    wanted = [f"experts/{number}/*" for number in select_experts(experts, numbers)]
    wanted += [f"{part}/*" for part in (PRETRAIN_PART, f"experts/{BASES[0]}")]
    others = [f"{part}/*" for part in index_entries(read_tree(root / MODEL_INDEX)) if part != "experts"]
    refused = [f"*{suffix}" for suffix in PICKLES] + ["*.py"]
    return fetch(str(name), [*wanted, *others, README, PICTURE], fix, refused, **hub)


def is_hub_name(name: str | os.PathLike[str]) -> bool:
    """Whether this is OWNER/MODEL of a hub, and no folder here."""
    return isinstance(name, str) and bool(HUB_NAME.fullmatch(name)) and not Path(name).exists()


def inspect_folder(root: Path, experts: Any) -> OpenFolder:
    """Check everything that can be checked before a network is built; raises as `open_folder`."""
    # The index may name only classes that somebody looked at: diffusers would import whatever it says.
    if not (root / MODEL_INDEX).is_file():
        raise ConfigError(f"{root} is no pipeline (no {MODEL_INDEX})", "give the folder of atoll export")
    index = read_tree(root / MODEL_INDEX)
    if (kind := index.get("_class_name")) != PIPELINE:
        raise ConfigError(f"{root} holds a {kind}, not an {PIPELINE}", "load it with its own class")
    for name, (library, class_name) in index_entries(index).items():
        own = {"experts": BANK, "router": ROUTER}.get(name)
        from_library, classes = COMPONENTS.get(name, ("", ()))
        if (library, class_name) != own and (library != from_library or class_name not in classes):
            what = f"{MODEL_INDEX} wants {name} from {library}.{class_name}"
            raise ConfigError(what, f"take one of a known class: {', '.join(classes) or 'no others'}")
        # Files that libraries might take for code, for pickled weights, or for a pipeline of its own.
        inside = [*islice((root / name).rglob("*"), MOST_FILES + 1)]
        if len(inside) > MOST_FILES:
            raise ConfigError(f"{root / name} holds more than {MOST_FILES:,} files", "export it again")
        for path in sorted(inside):
            if not path.is_file() and not path.is_dir():  # a pipe would wait for a writer
                raise StoreError(f"{path} is no regular file", "fetch or export the folder again")
            if path.suffix in PICKLES:
                raise StoreError(f"{path} is pickle, which is not read", "convert the weights to safetensors")
            is_known = path.suffix in SUFFIXES and path.name != MODEL_INDEX
            if path.is_file() and not (is_known or path.name == SIGNATURE):
                raise ConfigError(f"{path} has no place in {name}/, and is not read", "remove it")
            if path.suffix == ".safetensors":
                check_safetensors(path)
            if path.name == CONFIG:
                check_config(read_tree(path), str(path))
    defaults_in(index, {})

    # The manifest, and the cards of the parts that were asked for.
    files = Store.open(root)
    if not files.exists(MANIFEST):
        raise StoreError(f"{root} is not complete (no {MANIFEST})", REMEDY)
    manifest = Manifest.read(files, MANIFEST)
    listing = ExpertIndex.read(files, f"experts/{EXPERTS}")
    if not (root / "router").is_dir():
        raise StoreError(f"{root} has no router (no folder router/)", REMEDY)
    networks = manifest.checkpoints(files, experts=select_experts(experts, listing.numbers))
    cards = {part: network.check() for part, network in networks.items()}
    router, logits = cards.pop("router"), networks["router"].config().get("num_experts")
    for part, card in cards.items():
        check_place(card, PRETRAIN if part == PRETRAIN_PART else part.replace("experts/", "expert "), part)
    check_router(router, cards.values(), listing.k, logits)

    # What diffusers and transformers will read by themselves.
    components = tuple(name for name in index_entries(index) if name not in ("experts", "router"))
    for name in components:
        if not (root / name).is_dir():
            raise StoreError(f"{root} has no {name} (no folder {name}/)", REMEDY)
    entries = {entry.path: entry for entry in manifest.files}
    paths = {MODEL_INDEX, f"experts/{EXPERTS}", *(key for name in components for key in files.list(name))}
    for name in paths - {*entries}:
        raise StoreError(f"{root / name} is not listed in {MANIFEST}", REMEDY)
    for name in {name for name in entries if name.split("/")[0] in components} - paths:
        raise StoreError(f"{root / name} is missing", REMEDY)
    with hashers() as pool:
        list(pool.map(lambda path: check_file(files, "", entries[path]), paths))
    encoders = tuple(name for name in components if name != "scheduler")
    return OpenFolder(root, listing.k, networks, manifest.parts, encoders, manifest.about)


def output_folder(to: str | os.PathLike[str], kind: str = PIPELINE, files: Collection[str] = ()) -> Path:
    """The folder to write: a new or empty one, or an earlier one of the same kind of pipeline, or files."""
    if is_url(str(to)):
        raise ConfigError(f"{to} is a URL", "write to a folder, and copy it")
    root = resolved(to)
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file", "give a folder")
    index = root / MODEL_INDEX
    held = read_tree(index).get("_class_name") if index.is_file() else None
    # Parts that are not of this pipeline are removed on writing: a wrong path must not cost a folder.
    if held != kind and any(path.name not in files for path in root.rglob("*") if not path.is_dir()):
        raise ConfigError(f"{root} holds something else", "give a new folder")
    for path in root.rglob("*"):  # libraries write into it, which follow links
        if path.is_symlink():
            raise ConfigError(f"{path} is a link, and would be written through", "remove it")
    if (root.parent / "campaign.json").is_file():
        raise ConfigError(f"{root} belongs to a campaign", "give a folder of its own")
    return root


def mark_incomplete(root: Path, kind: str = PIPELINE) -> Store:
    """Make the folder, and write first what says that it is a pipeline's, so that a later try may go on."""
    folder = Store.open(root, create=True)
    folder.delete(SIGNATURE)  # of what lay there; it is the last to come
    if not folder.exists(MODEL_INDEX):
        folder.put_json(MODEL_INDEX, {"_class_name": kind})
    return folder


def select_experts(experts: Any, there: Sequence[int]) -> tuple[int, ...]:
    """The numbers that are meant, in order; `ConfigError` for none, or one that is not there."""
    if isinstance(experts, str) and experts == "auto":
        return tuple(there)
    if not isinstance(experts, Iterable) or not all(isinstance(n, Integral) for n in experts):
        raise ConfigError(f"experts={experts!r}", "give 'auto' or numbers such as [0, 2]")
    wanted = tuple(sorted(set(experts)))
    absent = [number for number in wanted if number not in there]
    if absent or not wanted:
        lacking = f"experts {listed(absent)} are not there" if absent else "no expert was asked for"
        raise ConfigError(lacking, f"there are {listed(there)}")
    return wanted


def check_router(card: Card, experts: Iterable[Card], k: int, knows: Any) -> None:
    """Refuse a router that does not belong to these experts (`PartitionError`)."""
    if card.role != "router":
        raise PartitionError(f"a card of role {card.role!r} lies in router/", "put the router's own there")
    if knows != k:
        raise PartitionError(f"the router knows {knows} experts, the bank has {k} places", "use its own")
    check_together([card, *experts])


def read_tree(path: Path) -> dict[str, Any]:
    """Content of a JSON file; `StoreError` if it is missing or none."""
    if not path.is_file():
        raise StoreError(f"{path} is missing", REMEDY)
    try:
        content = read_json(path.read_bytes() if path.stat().st_size <= LARGEST else b"")
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise StoreError(f"{path} is not valid JSON", REMEDY)
    return content
