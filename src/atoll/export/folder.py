"""The folder of a pipeline: found or fetched, and checked before anything in it is loaded.

`ensemble.json` is written last and names every file that a network, tokenizer or scheduler is read from by
size and SHA-256. README.md and the picture are not named: they may be edited.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.base.errors import ConfigError, StoreError
from atoll.ensemble.card import Card, check_place
from atoll.ensemble.folder import BANK, MODEL_INDEX, PIPELINE, README, ROUTER
from atoll.ensemble.folder import INDEX as EXPERTS
from atoll.export.bank import Chosen, check_router, choose, read_index
from atoll.export.parts import AGAIN, PICKLES, check_part, check_safetensors, refuse_pickle
from atoll.store.location import is_url
from atoll.store.manifest import FileEntry
from atoll.store.store import to_json

SCHEMA = 1
MANIFEST, PICTURE = "ensemble.json", "picture.png"
_LIBRARIES = ("diffusers", "transformers")
_HUB = re.compile(r"\w[\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Found:
    """What a folder holds, all checked.

    Attributes:
        root: the folder.
        k: number of clusters.
        experts: cards of the experts that were asked for.
        router: card of the router.
        parts: digests of all parts that the manifest names, those that were not asked for too.
        components: folders of the optional parts that are there.
        about: what the model card says beside the cards.
    """

    root: Path
    k: int
    experts: Mapping[int, Card]
    router: Card
    parts: Mapping[str, str]
    components: tuple[str, ...]
    about: Mapping[str, Any]


def locate(name: str | os.PathLike[str], experts: Chosen, **hub: Any) -> Path:
    """The folder of a pipeline on this machine; of a hub's, only what is asked for is fetched.

    Args:
        name: a folder, or a hub name.
        experts: numbers of the experts, or `auto`.
        hub: `revision`, `local_files_only`, `cache_dir`, `token` of huggingface_hub.

    Raises:
        ConfigError: there is no such folder, it cannot be fetched, or it lacks an expert.
    """
    path = Path(name).expanduser()
    if (path / "campaign.json").is_file() or (path / "campaign.yaml").is_file():
        raise ConfigError(f"{path} is a campaign", f"give its folder {path / 'ensemble'}")
    if path.is_dir():
        return path
    if "://" in str(name):
        raise ConfigError(f"{name} is a URL", "write the folder first: atoll export CAMPAIGN --to FOLDER")
    if not _HUB.fullmatch(str(name)):
        raise ConfigError(f"there is no folder {path}", "give a folder or a hub name such as OWNER/MODEL")
    root = _fetch(str(name), [MANIFEST, MODEL_INDEX, f"experts/{EXPERTS}"], hub)
    _, there = read_index(root / "experts")
    wanted = [f"experts/{number}/*" for number in choose(experts, there)]
    others = [f"{part}/*" for part in _components(read_json(root / MODEL_INDEX)) if part != "experts"]
    refused = [f"*{suffix}" for suffix in PICKLES] + ["*.py"]
    return _fetch(str(name), [*wanted, *others, README, PICTURE], hub, refused)


def inspect_folder(root: Path, experts: Chosen) -> Found:
    """Check everything that can be checked before a network is built.

    Raises:
        ConfigError: not a pipeline of Atoll, or an expert that is not there.
        StoreError: a part is missing, damaged, pickle, or not what the manifest says.
        PartitionError: parts that do not belong together.
    """
    index, manifest = _model_index(root), _manifest(root)
    k, there = read_index(root / "experts")
    chosen = choose(experts, there)
    if not (root / "router").is_dir():
        raise StoreError(f"{root} has no router (no folder router/)", AGAIN)
    router = check_part(root / "router")
    cards = {number: check_part(root / "experts" / str(number)) for number in chosen}
    for number, card in cards.items():
        check_place(card, number, f"experts/{number}")
    check_router(router, cards, k, int(read_json(root / "router" / "config.json")["num_experts"]))
    components = _optional(root, index)
    for name, digest in parts_of(cards, router).items():
        if manifest["parts"].get(name) != digest:
            raise StoreError(f"{root / name} is not the part that {MANIFEST} names", AGAIN)
    _check_files(root, manifest, _wanted(chosen, index))
    return Found(root, k, cards, router, manifest["parts"], components, manifest.get("about", {}))


def target(to: str | os.PathLike[str], kind: str = PIPELINE) -> Path:
    """The folder to write: a new or empty one, or an earlier one of the same kind of pipeline.

    Raises:
        ConfigError: it holds something else, or cannot be a folder.
    """
    if is_url(str(to)):
        raise ConfigError(f"{to} is a URL", "write to a folder, and copy it")
    root = Path(to).expanduser().resolve()
    if root.exists() and not root.is_dir():
        raise ConfigError(f"{root} is a file", "give a folder")
    index = root / MODEL_INDEX
    held = read_json(index).get("_class_name") if index.is_file() else None
    if root.is_dir() and any(root.iterdir()) and held != kind:
        raise ConfigError(f"{root} holds something else", "give a new folder")
    if (root.parent / "campaign.json").is_file():
        raise ConfigError(f"{root} belongs to a campaign", "give a folder of its own")
    return root


def put_picture(root: Path, picture: bytes | None) -> None:
    """Write the model card's picture, or remove an earlier one."""
    if picture is None:
        (root / PICTURE).unlink(missing_ok=True)
    else:
        (root / PICTURE).write_bytes(picture)


def parts_of(experts: Mapping[int, Card], router: Card) -> dict[str, str]:
    """Digest of the weights of every part, as the manifest names them."""
    found = {f"experts/{number}": card.weights_sha256 for number, card in experts.items()}
    return {**found, "router": router.weights_sha256}


def write_manifest(
    root: Path, k: int, experts: Mapping[int, Card], router: Card, about: Mapping[str, Any]
) -> None:
    """Write `ensemble.json` over what lies in the folder."""
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    index = _components(read_json(root / MODEL_INDEX))
    kept = [name for name in names if name == MODEL_INDEX or name.split("/")[0] in index]
    with ThreadPoolExecutor(_workers()) as pool:
        files = list(pool.map(lambda name: _entry(root, name).model_dump(), kept))
    content = {
        "schema": SCHEMA,
        "k": k,
        "experts": sorted(experts),
        "partition": router.partition,
        "parts": parts_of(experts, router),
        "about": dict(about),
        "files": files,
    }
    (root / MANIFEST).write_bytes(to_json(content))


def _fetch(name: str, patterns: list[str], hub: Mapping[str, Any], ignored: list[str] | None = None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored, **hub))
    except Exception as error:  # the hub's client has several families of them
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{name!r} is no folder, and as a hub name it cannot be had ({reason})",
            "check the name, the revision and the network",
        ) from None


def _model_index(root: Path) -> dict[str, Any]:
    """`model_index.json`, if it is a pipeline of ours and names no other code than diffusers' and ours."""
    if not (root / MODEL_INDEX).is_file():
        raise ConfigError(f"{root} is no pipeline (no {MODEL_INDEX})", "give the folder of atoll export")
    index = read_json(root / MODEL_INDEX)
    kind = index.get("_class_name")
    if kind != PIPELINE:
        raise ConfigError(f"{root} holds a {kind}, not an {PIPELINE}", "load it with its own class")
    for name, (library, class_name) in _components(index).items():
        ours = {"experts": BANK, "router": ROUTER}.get(name)
        if (library, class_name) != ours and (ours or library not in _LIBRARIES):
            raise ConfigError(
                f"{MODEL_INDEX} wants {name} from {library}.{class_name}",
                "only diffusers and transformers may",
            )
        if list((root / name).glob("*.py")):
            raise ConfigError(f"{root / name} holds code, which is not run", "remove it")
    return index


def _manifest(root: Path) -> dict[str, Any]:
    if not (root / MANIFEST).is_file():
        raise StoreError(f"{root} is not complete (no {MANIFEST})", AGAIN)
    manifest = read_json(root / MANIFEST)
    if manifest.get("schema") != SCHEMA:
        raise StoreError(
            f"{root / MANIFEST} has schema {manifest.get('schema')}",
            f"this Atoll reads {SCHEMA}: export again",
        )
    return manifest


def _components(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Name, library and class of the components that have a folder."""
    pairs = {name: value for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {name: (str(library), str(kind)) for name, (library, kind) in pairs.items() if library is not None}


def _optional(root: Path, index: Mapping[str, Any]) -> tuple[str, ...]:
    """The encoders that have a folder, their weights looked at."""
    there = [name for name in _components(index) if name not in ("experts", "router")]
    for name in there:
        if not (root / name).is_dir():
            raise StoreError(f"{root} has no {name} (no folder {name}/)", AGAIN)
        refuse_pickle(root / name)
        for weights in (root / name).glob("*.safetensors"):
            check_safetensors(weights)
    return tuple(name for name in there if name != "scheduler")


def _wanted(chosen: Sequence[int], index: Mapping[str, Any]) -> tuple[str, ...]:
    """Beginnings of the paths that this load reads."""
    others = [f"{name}/" for name in _components(index) if name != "experts"]
    return (MODEL_INDEX, f"experts/{EXPERTS}", *(f"experts/{number}/" for number in chosen), *others)


def _check_files(root: Path, manifest: Mapping[str, Any], wanted: tuple[str, ...]) -> None:
    """Hold every file that will be read against its entry: presence and sizes first, then the digests."""
    entries = [FileEntry.parse(tree, str(root / MANIFEST)) for tree in manifest["files"]]
    entries = [entry for entry in entries if entry.path.startswith(wanted)]
    for entry in entries:
        path = root / entry.path
        if not path.is_file():
            raise StoreError(f"{path} is missing", AGAIN)
        if path.stat().st_size != entry.bytes:
            raise StoreError(f"{path} has {path.stat().st_size} bytes instead of {entry.bytes}", AGAIN)
    with ThreadPoolExecutor(_workers()) as pool:
        found = list(pool.map(lambda entry: _entry(root, entry.path), entries))
    for entry, now in zip(entries, found, strict=True):
        if entry.sha256 != now.sha256:
            raise StoreError(f"{root / entry.path} does not match its SHA-256", AGAIN)


def _entry(root: Path, name: str) -> FileEntry:
    with (root / name).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(path=name, bytes=file.tell(), sha256=found)


def _workers() -> int:
    return min(4, os.cpu_count() or 1)


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file; `StoreError` if it is missing or none."""
    if not path.is_file():
        raise StoreError(f"{path} is missing", AGAIN)
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise StoreError(f"{path} is not valid JSON", AGAIN)
    return content
