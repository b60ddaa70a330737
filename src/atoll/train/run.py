"""One training run of a campaign: from its folder and `campaign.json` to a published network.

An expert's run opens `islands/K/` and nothing else of the store.
"""

from collections.abc import Mapping
from typing import Any

import torch

from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import ConfigError, PartitionError
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import start
from atoll.campaign.partition import initial_network, initial_router
from atoll.campaign.pretrain import hand_over
from atoll.campaign.publication import tidy
from atoll.campaign.runs import run_folder
from atoll.campaign.settings.loggers import TrackingConfig
from atoll.campaign.settings.train import Recipe, RunPlan
from atoll.data.dataset import DataSet
from atoll.data.samples import Samples
from atoll.ensemble.card import Card
from atoll.ensemble.expert import published
from atoll.flow.settings import ObjectiveConfig
from atoll.networks.settings import DataShape
from atoll.store.store import Store
from atoll.train.distill import DistillTask
from atoll.train.expert import DenoiserTask
from atoll.train.loggers import check_trackers
from atoll.train.loop import train
from atoll.train.router import RouterTask
from atoll.train.teachers import lay_start, load_teacher, settings_of_student, teachers


def train_run(campaign: Campaign, role: str, island: int | None = None, *, wait: bool = False) -> None:
    """Train an expert, the router, the monolith, the pretrained network or the student; or go on with it.

    Shared pretraining that is finished hands its weights over to the experts.

    Raises:
        PartitionError: the campaign has not been partitioned, has no such island, or the run starts from
            weights or learns from experts that are not there.
        ConfigError: a tracker is wanted whose package or key is not there.
    """
    folder = run_folder(role, island)
    if role == "pretrain" and not campaign.config.budget.pretrain:
        raise ConfigError(
            f"budget.pretrain is 0 in {campaign.store.location}: it has no shared pretraining",
            "start a campaign with, for example, --set budget.pretrain=0.3",
        )
    if role == "student":
        settings_of_student(campaign)
    if not campaign.store.exists(f"{folder}/island.json"):
        late = " with the same --set" if role == "student" else ""
        raise PartitionError(
            f"{campaign.store.name(folder)} has no island.json",
            f"run 'atoll partition {campaign.store.location}'{late} first",
        )
    store = campaign.store.sub(folder)
    plan = RunPlan.read(store, "island.json")
    # An expert sees its own folder; the others read the islands' shards by path.
    dataset = (
        DataSet.open(store, "data") if role == "expert" else DataSet.open(campaign.store, f"{folder}/data")
    )
    name = folder.replace("islands/", "expert ")
    if published(store, "expert"):
        tidy(store)
        say(f"{name}: finished already")  # nothing else is needed then, such as the weights it started from
    else:
        check_trackers(campaign.config.tracking)
        # Damage is told before the first step, and loader workers find all they read on local disk.
        dataset.localise(["latents", *(["text"] if campaign.config.condition == "text" else [])])
        if role == "router":
            _train_router(campaign, plan, dataset, store, wait)
        else:
            _train_denoiser(campaign, plan, dataset, store, name, wait)
    if role == "pretrain":
        hand_over(campaign)


def _train_denoiser(
    campaign: Campaign, plan: RunPlan, dataset: DataSet, store: Store, name: str, wait: bool
) -> None:
    config, shape = campaign.config, plan.shape
    settings, training = config.denoiser(plan.role, plan.island)
    cards = teachers(campaign, plan) if plan.role == "student" else {}
    network = initial_network(settings, shape, plan.init_seed)
    if plan.init == "experts":
        lay_start(campaign, store, plan, network, cards)
    plan = start(network, plan, store, name)
    network = network.to(own_device())
    objective = config.objective_of(plan.island)
    recipe = Recipe(objective=objective, train=training, network=settings.model_dump(), plan=plan)
    rows, heldout = _splits(campaign, dataset, shape)
    made = dataset.producers()
    task = (
        _student_task(campaign, network, rows, heldout, recipe, cards, made)
        if plan.role == "student"
        else DenoiserTask(network, settings.family, rows, heldout, recipe, *made)
    )
    train(task, task.recipe, store, name, wait=wait, tracking=_tracking(campaign))


def _student_task(
    campaign: Campaign,
    network: torch.nn.Module,
    rows: Samples,
    heldout: Samples,
    recipe: Recipe,
    cards: Mapping[str, Card],
    made: tuple[dict[str, Any], dict[str, Any] | None],
) -> DistillTask:
    """The student's task. Its recipe names its teachers, so it does not go on under others."""
    own, objective = settings_of_student(campaign), recipe.objective
    told = own.model_dump(include={"teacher", "routing", "data_weight"})
    told["teachers"] = {folder: card.weights_sha256 for folder, card in cards.items()}
    objective = ObjectiveConfig(time=objective.time, condition_dropout=objective.condition_dropout)
    recipe = recipe.model_copy(
        update={"objective": objective, "network": {**recipe.network, "student": told}}
    )
    teacher = load_teacher(campaign, cards, own_device())
    family = campaign.config.denoiser("student")[0].family
    clusters = _clusters(rows.dataset)
    return DistillTask(network, family, rows, heldout, clusters, recipe, teacher, own.data_weight, *made)


def _train_router(campaign: Campaign, plan: RunPlan, dataset: DataSet, store: Store, wait: bool) -> None:
    shape, own = plan.shape, campaign.config.router
    network = initial_router(campaign, shape)
    plan = start(network, plan, store, "router")
    network = network.to(own_device())
    settings = own.model_dump(exclude={"time", "condition_dropout", "train", "share"})
    objective = ObjectiveConfig(time=own.time, condition_dropout=own.condition_dropout)
    recipe = Recipe(objective=objective, train=own.train, network=settings, plan=plan)
    rows, heldout = _splits(campaign, dataset, shape)
    clusters = _clusters(dataset)
    train(
        RouterTask(network, rows, heldout, clusters, recipe, own.pure_noise, *dataset.producers()),
        recipe,
        store,
        "router",
        wait=wait,
        tracking=_tracking(campaign),
    )


def _tracking(campaign: Campaign) -> TrackingConfig:
    """The settings, with the campaign's own name where none is set."""
    settings = campaign.config.tracking
    name = settings.name or campaign.store.location.rstrip("/").rpartition("/")[2]
    return settings.model_copy(update={"name": name})


def _splits(campaign: Campaign, dataset: DataSet, shape: DataShape) -> tuple[Samples, Samples]:
    kind = campaign.config.condition
    return (
        Samples(dataset, dataset.split("train"), kind, shape),
        Samples(dataset, dataset.split("heldout"), kind, shape),
    )


def _clusters(dataset: DataSet) -> torch.Tensor:
    """Cluster of every row."""
    return dataset.column("clusters").read(range(len(dataset))).long()


def parse_role(role: str, island: int | None, k: int) -> None:
    """Check what `atoll train` was asked for."""
    if role == "expert" and (island is None or not 0 <= island < k):
        what = "which expert?" if island is None else f"there is no expert {island}"
        raise ConfigError(what, f"give --expert 0 to {k - 1}")
    if role != "expert" and island is not None:
        raise ConfigError(f"--expert goes with 'train expert', not with 'train {role}'", "leave it out")
