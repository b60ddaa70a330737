"""The ensemble from what has been published, complete or partial."""

from collections.abc import Mapping, Sequence

import torch

from atoll.base.console import say
from atoll.base.errors import PartitionError, StoreError
from atoll.campaign.campaign import Campaign
from atoll.ensemble.card import Card, check_together
from atoll.ensemble.dispatch import Experts
from atoll.ensemble.ensemble import Costs, Ensemble
from atoll.ensemble.expert import Expert, RouterModel, published, read_card, read_part
from atoll.ensemble.residency import Residency, ResidentExperts
from atoll.ensemble.sample import flow_scheduler
from atoll.ensemble.stored import StoredExpert
from atoll.networks.checkpoint import WEIGHTS
from atoll.store.manifest import FileEntry, check_file, read_file, write_file
from atoll.store.store import Store, to_json

SCHEMA = 1
MANIFEST = "ensemble/ensemble.json"
_FILES = ("config.json", WEIGHTS, "card.json")


def assemble(campaign: Campaign) -> list[int]:
    """Write `ensemble/`: experts, router, scheduler, and `ensemble.json` that names every file by hash.

    Returns:
        Numbers of the experts that are in it.

    Raises:
        PartitionError: nothing to assemble, or parts of different campaigns.
    """
    store = campaign.store
    if not store.exists("partition/partition.json"):
        raise PartitionError(
            f"{store.location} has no partition", "run 'atoll launch' or 'atoll partition' first"
        )
    k = store.get_json("partition/partition.json")["k"]
    present = [number for number in range(k) if published(store, f"islands/{number}/expert")]
    if not present or not published(store, "router/expert"):
        what = "no expert" if not present else "no router"
        raise PartitionError(f"{store.location} has {what} yet", "train first: atoll launch")
    parts = {f"experts/{n}": f"islands/{n}/expert" for n in present} | {"router": "router/expert"}
    cards = {name: read_card(store, folder) for name, folder in parts.items()}
    check_together(list(cards.values()))
    made = store.get_json("partition/partition.json")["hash"]
    if cards["router"].partition != made:
        raise PartitionError(
            f"the parts in {store.location} were made for another partition", "put their own back"
        )
    _check_places(present, cards)
    wanted = {name: card.weights_sha256 for name, card in cards.items()}
    if _is_assembled(store, wanted):
        say(f"ensemble: assembled already, experts {_listed(present)} of {k}")
        return present
    entries = []
    for name, folder in parts.items():
        read_part(store, folder)  # damaged weights are told here, not when somebody samples
        for file in _FILES:
            entries.append(write_file(store, "ensemble", f"{name}/{file}", store.get(f"{folder}/{file}")))
    scheduler = flow_scheduler(1)
    settings = {"_class_name": type(scheduler).__name__, **_plain(dict(scheduler.config))}
    entries.append(write_file(store, "ensemble", "scheduler/scheduler_config.json", to_json(settings)))
    content = {
        "schema": SCHEMA,
        "k": k,
        "experts": present,
        "partition": cards["router"].partition,
        "parts": wanted,
    }
    store.put_json(MANIFEST, {**content, "files": [entry.model_dump() for entry in entries]})
    missing = sorted(set(range(k)) - set(present))
    say(f"ensemble: experts {_listed(present)} of {k} and the router")
    if missing:
        say(f"  warning: partial: experts {_listed(missing)} are missing; their share goes to the others")
    return present


def load_ensemble(
    store: Store, residency: Residency | None = None, device: torch.device | str = "cpu"
) -> tuple[Ensemble, Card]:
    """The ensemble of a campaign, every file verified, and the router's card.

    Args:
        store: the campaign.
        residency: how many experts stay on the device; the others are brought when they are needed. With no
            limit all are loaded.
        device: where it is evaluated.

    Raises:
        StoreError: not assembled, or a file is not what the manifest says.
        ConfigError: the budget holds no expert.
    """
    if not store.exists(MANIFEST):
        raise StoreError(f"{store.location} has no ensemble", "run 'atoll assemble' first")
    content = store.get_json(MANIFEST)
    if content.get("schema") != SCHEMA:
        raise StoreError(
            f"{MANIFEST} has schema {content.get('schema')}", f"this Atoll reads {SCHEMA}: assemble again"
        )
    for tree in content["files"]:
        check_file(store, "ensemble", FileEntry.parse(tree, MANIFEST))
    router = RouterModel.load(store, "ensemble/router")
    router.network.to(device)
    numbers, k = content["experts"], content["k"]
    cards = {n: read_card(store, f"ensemble/experts/{n}") for n in numbers}
    costs = Costs(
        router.card.forward_flops, [cards[n].forward_flops if n in cards else 0.0 for n in range(k)]
    )
    absent = [n for n in range(k) if n not in cards]
    experts = _resident(store, k, numbers, residency, device)
    return Ensemble(experts, router, absent, costs), router.card


def _resident(
    store: Store, k: int, numbers: Sequence[int], residency: Residency | None, device: torch.device | str
) -> Experts:
    """All experts on the device, or as many as the budget lets."""
    places = {n: f"ensemble/experts/{n}" for n in numbers}
    if residency is None or not residency.limited:
        loaded = {n: Expert.load(store, place) for n, place in places.items()}
        for expert in loaded.values():
            expert.network.to(device)
        return [loaded.get(n) for n in range(k)]
    stored = {n: StoredExpert.find(store, place, verified=True) for n, place in places.items()}
    return ResidentExperts([stored.get(n) for n in range(k)], residency, device)


def _check_places(present: Sequence[int], cards: Mapping[str, Card]) -> None:
    """Refuse an expert that lies where another one belongs: the router would send it the wrong samples."""
    for number in present:
        card = cards[f"experts/{number}"]
        if card.role != "expert" or card.island != number:
            raise PartitionError(
                f"islands/{number} holds {card.role} {card.island}", f"publish expert {number} there"
            )


def _is_assembled(store: Store, parts: Mapping[str, str]) -> bool:
    """Whether `ensemble/` is of these parts and undamaged."""
    if not store.exists(MANIFEST):
        return False
    content = store.get_json(MANIFEST)
    if content.get("schema") != SCHEMA or content.get("parts") != parts:
        return False
    try:
        for tree in content["files"]:
            read_file(store, "ensemble", FileEntry.parse(tree, MANIFEST))
    except StoreError:
        return False
    return True


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _plain(settings: dict[str, object]) -> dict[str, object]:
    return {
        k: v
        for k, v in settings.items()
        if not k.startswith("_") and isinstance(v, str | int | float | bool | None)
    }
