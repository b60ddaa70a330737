"""The ensemble from what has been published, complete or partial."""

from collections.abc import Mapping
from typing import Any

from atoll.base.console import say
from atoll.base.errors import PartitionError, StoreError
from atoll.base.hashing import sha256
from atoll.campaign.card_facts import about
from atoll.campaign.folder import Campaign
from atoll.ensemble.card import Card, check_place, check_together
from atoll.ensemble.expert import published, read_card, read_part
from atoll.ensemble.folder import INDEX as EXPERTS
from atoll.ensemble.folder import MODEL_INDEX, README, index, listed, model_index
from atoll.ensemble.integrate import euler
from atoll.ensemble.model import SCHEMA
from atoll.ensemble.model_card import model_card
from atoll.networks.checkpoint import WEIGHTS
from atoll.store.manifest import FileEntry, read_file, write_file
from atoll.store.store import Store, to_json

MANIFEST = "ensemble/ensemble.json"
_FILES = ("config.json", WEIGHTS, "card.json")


def assemble(campaign: Campaign) -> list[int]:
    """Write `ensemble/`: a folder that `AtollPipeline` loads, and `ensemble.json` that names its files.

    Parts that lie there unchanged are left alone, so an expert that comes later costs its own bytes only.

    Returns:
        Numbers of the experts that are in it.

    Raises:
        PartitionError: nothing to assemble, or parts of different campaigns.
    """
    store = campaign.store
    k, folders, cards = _gather(campaign)
    present = [card.island for card in cards.values() if card.island is not None]
    old, small = _entries(store), _small_files(campaign, k, cards)
    entries, written = [], 0
    for name, folder in folders.items():
        kept = _kept(store, old, name, cards[name])
        if kept is None:
            read_part(store, folder)  # damaged weights are told here, not when somebody samples
            kept = [write_file(store, "ensemble", f"{name}/{f}", store.get(f"{folder}/{f}")) for f in _FILES]
            written += 1
        entries += kept
    for path, data in small.items():
        if not _is_there(store, old.get(path), data):
            written += 1
            write_file(store, "ensemble", path, data)
        entries.append(FileEntry(path=path, bytes=len(data), sha256=sha256(data)))
    gone = old.keys() - {entry.path for entry in entries}
    if not written and not gone:
        say(f"ensemble: assembled already, experts {listed(present)} of {k}")
        return present
    _finish(campaign, k, cards, entries)
    store.delete(*(f"ensemble/{path}" for path in gone))
    missing = sorted(set(range(k)) - set(present))
    say(f"ensemble: experts {listed(present)} of {k} and the router")
    if missing:
        say(f"  warning: partial: experts {listed(missing)} are missing; their share goes to the others")
    return present


def _gather(campaign: Campaign) -> tuple[int, dict[str, str], dict[str, Card]]:
    """K, and by the part's place below `ensemble/`: the folder it was published in, and its card."""
    store = campaign.store
    if not store.exists("partition/partition.json"):
        raise PartitionError(
            f"{store.location} has no partition", "run 'atoll launch' or 'atoll partition' first"
        )
    cut = store.get_json("partition/partition.json")
    present = [number for number in range(cut["k"]) if published(store, f"islands/{number}/expert")]
    if not present or not published(store, "router/expert"):
        what = "no expert" if not present else "no router"
        raise PartitionError(f"{store.location} has {what} yet", "train first: atoll launch")
    folders = {f"experts/{n}": f"islands/{n}/expert" for n in present} | {"router": "router/expert"}
    cards = {name: read_card(store, folder) for name, folder in folders.items()}
    check_together(list(cards.values()))
    if cards["router"].partition != cut["hash"]:
        raise PartitionError(
            f"the parts in {store.location} were made for another partition", "put their own back"
        )
    for number in present:
        check_place(cards[f"experts/{number}"], number, f"islands/{number}")
    return cut["k"], folders, cards


def _finish(campaign: Campaign, k: int, cards: Mapping[str, Card], entries: list[FileEntry]) -> None:
    """Write the model card, and the manifest last."""
    store, experts = campaign.store, _experts(cards)
    parts = {name: card.weights_sha256 for name, card in cards.items()}
    told = about(campaign, parts)
    name = f"{told['name']}/ensemble"
    text = model_card(cards["router"], experts, k, told, defaults(campaign), picture=False, name=name)
    store.put(f"ensemble/{README}", text.encode())
    content = {
        "schema": SCHEMA,
        "k": k,
        "experts": sorted(experts),
        "partition": cards["router"].partition,
        "parts": parts,
        "about": told,
        "files": [entry.model_dump() for entry in entries],
    }
    store.put_json(MANIFEST, content)


def _experts(cards: Mapping[str, Card]) -> dict[int, Card]:
    return {card.island: card for card in cards.values() if card.island is not None}


def defaults(campaign: Campaign) -> dict[str, Any]:
    """What a call of the pipeline takes that says nothing else."""
    settings = campaign.config.sampling
    return {
        "num_inference_steps": settings.steps,
        "guidance_scale": settings.guidance,
        "routing": str(settings.routing),
    }


def _small_files(campaign: Campaign, k: int, cards: Mapping[str, Card]) -> dict[str, bytes]:
    """What makes the folder one that `AtollPipeline.from_pretrained` reads."""
    scheduler = euler(1)
    kind = type(scheduler).__name__
    contents = {
        "scheduler/scheduler_config.json": {"_class_name": kind, **_plain(dict(scheduler.config))},
        f"experts/{EXPERTS}": index(k, _experts(cards)),
        MODEL_INDEX: model_index({"scheduler": ("diffusers", kind)}, defaults(campaign)),
    }
    return {path: to_json(content) for path, content in contents.items()}


def _entries(store: Store) -> dict[str, FileEntry]:
    """The files that the last assembly named, by path."""
    if not store.exists(MANIFEST):
        return {}
    content = store.get_json(MANIFEST)
    if content.get("schema") != SCHEMA:
        return {}
    entries = [FileEntry.parse(tree, MANIFEST) for tree in content["files"]]
    return {entry.path: entry for entry in entries}


def _kept(store: Store, old: Mapping[str, FileEntry], name: str, card: Card) -> list[FileEntry] | None:
    """The entries of a part that lies there already, undamaged; None if it has to be written."""
    entries = [old[path] for file in _FILES if (path := f"{name}/{file}") in old]
    try:
        for entry in entries:
            read_file(store, "ensemble", entry)
        same = len(entries) == len(_FILES) and read_card(store, f"ensemble/{name}") == card
    except StoreError:
        return None
    return entries if same else None


def _is_there(store: Store, old: FileEntry | None, data: bytes) -> bool:
    """Whether a small file was written with these bytes before, and still has them."""
    try:
        return old is not None and old.sha256 == sha256(data) and bool(read_file(store, "ensemble", old))
    except StoreError:
        return False


def _plain(settings: dict[str, object]) -> dict[str, object]:
    return {
        k: v
        for k, v in settings.items()
        if not k.startswith("_") and isinstance(v, str | int | float | bool | None)
    }
