"""Who the student learns from, and where it starts: from what the islands have published."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atoll.base.console import say
from atoll.base.errors import ConfigError, PartitionError
from atoll.campaign.folder import Campaign
from atoll.campaign.runs import Run, RunPlan, experts_of
from atoll.campaign.settings.train import StudentConfig
from atoll.model.bank import Bank
from atoll.model.card import Card, check_place, check_together
from atoll.model.expert import RouterModel, published, read_card, read_part
from atoll.model.initial import lay_initial
from atoll.model.model import load_experts
from atoll.networks.checkpoint import compare
from atoll.store.store import Store
from atoll.train.distill import ClusterTeacher, RoutedTeacher, Teacher


def settings_of_student(campaign: Campaign) -> StudentConfig:
    """The student's settings; `ConfigError` if the campaign has none."""
    if campaign.config.student is None:
        raise ConfigError(
            f"{campaign.store.location} has no student",
            "add 'student: {}' to campaign.yaml, then run 'atoll partition' again",
        )
    return campaign.config.student


def teachers(campaign: Campaign, plan: RunPlan) -> dict[str, Card]:
    """Cards of all that the student learns from: the experts by their folders, and perhaps the router.

    A part of the experts will not do: the student would learn a part of the data, and what it had learned
    would depend on when it was started.

    Raises:
        PartitionError: one is missing, lies in another's place, or is of another partition.
    """
    store, k = campaign.store, campaign.config.partition.k
    folders = {run.folder: number for number, run in enumerate(experts_of(k))}
    missing = [str(n) for folder, n in folders.items() if not published(store, f"{folder}/expert")]
    if missing:
        raise PartitionError(
            f"the student learns from all experts, and of {k} in {store.location} these are not published: "
            + ", ".join(missing),
            "train them first: atoll launch",
        )
    cards = {folder: read_card(store, f"{folder}/expert") for folder in folders}
    for folder, number in folders.items():
        check_place(cards[folder], f"expert {number}", folder)
    if settings_of_student(campaign).teacher == "routed":
        if not published(store, "router/expert"):
            raise PartitionError(
                f"the student's teachers are routed, and {store.location} has no router yet",
                "train it first: atoll train router",
            )
        cards["router"] = read_card(store, "router/expert")
    check_together(list(cards.values()))
    if cards[Run("expert", 0).folder].partition != plan.partition:
        raise PartitionError(
            f"the experts in {store.location} were made for another partition than the student",
            "put their own back",
        )
    return cards


def load_teacher(campaign: Campaign, cards: Mapping[str, Card], device: torch.device) -> Teacher:
    """Load what `teachers` found, on the device as far as `student.residency` allows."""
    settings, store, k = settings_of_student(campaign), campaign.store, campaign.config.partition.k
    places = {number: Run("expert", number).network for number in range(k)}
    experts = load_experts(store, k, places, settings.residency, device, verified=False)
    if settings.teacher == "cluster":
        return ClusterTeacher(experts)
    router = RouterModel.load(store, "router/expert")
    router.network.to(device)
    return RoutedTeacher(Bank(experts, router), settings.routing)


def lay_start(
    campaign: Campaign, run: Store, plan: RunPlan, network: nn.Module, cards: Mapping[str, Card]
) -> None:
    """Write `student/init/` from the experts, where it is not there: their average, or one of them.

    Args:
        campaign: with published experts.
        run: narrowed to the student's folder.
        plan: of the student.
        network: the student's; changed in place.
        cards: of the experts, by folder.

    Raises:
        ConfigError: an expert's network is another one than the student's.
        PartitionError: `init/` was made from other experts.
    """
    start, number = settings_of_student(campaign).origin()
    chosen = [Run("expert", number).folder] if start == "expert" else [f for f in cards if f != "router"]
    origin: dict[str, Any] = {"start": start, "experts": {f: cards[f].weights_sha256 for f in chosen}}
    average = partial(_average, campaign.store, chosen, network)
    if lay_initial(run, network, "experts", origin, plan.partition, average, "the experts") is not None:
        say(f"student: starts from {'the average of the experts' if start == 'average' else chosen[0]}")


def _average(store: Store, folders: list[str], network: nn.Module) -> dict[str, Tensor]:
    """The mean of the experts' weights, summed in float64; one network is read at a time."""
    total: dict[str, Tensor] = {}
    for folder in folders:
        weights = read_part(store, f"{folder}/expert")[2]
        fit = compare(network, weights)
        if fit.drawn or fit.unused:
            name = next(iter((*fit.drawn, *fit.unused)))
            raise ConfigError(
                f"student.start: the network of {folder} is another one than the student's ({name})",
                "set student.start: scratch",
            )
        for name, value in weights.items():
            total[name] = total[name] + value.double() if name in total else value.double()
    return {name: (value / len(folders)).float() for name, value in total.items()}
