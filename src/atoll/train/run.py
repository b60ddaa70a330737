"""One training run of a campaign: from its folder and `campaign.json` to a published network.

An expert's run opens `islands/K/` and nothing else of the store.
"""

import os
from pathlib import Path

from torch import nn

from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import ConfigError, PartitionError, nearest
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import start
from atoll.campaign.partition import initial_network, initial_router
from atoll.campaign.pretrain import hand_over
from atoll.campaign.publication import KEY, tidy
from atoll.campaign.runs import RUNS, Recipe, Run, RunPlan
from atoll.campaign.token_encoder import token_encoder
from atoll.data.dataset import DataSet
from atoll.flow.settings import ObjectiveConfig
from atoll.model.card import Card
from atoll.model.expert import published, read_card
from atoll.networks.router import Router
from atoll.store.signatures import public_key
from atoll.store.store import Store
from atoll.train.distill import DistillTask
from atoll.train.expert import DenoiserTask
from atoll.train.loggers import check_trackers
from atoll.train.loop import Task, train
from atoll.train.router import RouterTask
from atoll.train.rows import TrainingRows
from atoll.train.teachers import lay_start, load_teacher, settings_of_student, teachers


def train_run(campaign: Campaign, role: str, expert: int | None = None, *, wait: bool = False) -> Card:
    """Train an expert, the router, the monolith, the pretrained network or the student; or go on with it.

    Shared pretraining that is finished hands its weights over to the experts.

    Returns:
        The card of the finished network.

    Raises:
        PartitionError: the campaign has not been partitioned, has no such expert, or the run starts from
            weights or learns from experts that are not there.
        ConfigError: a tracker is wanted whose package or key is not there.
    """
    check_run(role, expert, campaign.config.partition.k)
    run = Run(role, expert)
    _check(campaign, run)
    store, name = campaign.store.sub(run.folder), run.name
    store.sweep()
    plan = RunPlan.read(store, "island.json")
    # An expert sees its own folder; the others read the islands' shards by path.
    dataset = (
        DataSet.open(store, "data")
        if role == "expert"
        else DataSet.open(campaign.store, f"{run.folder}/data")
    )
    if published(store, "expert"):
        tidy(store)
        say(f"{name}: finished already")  # nothing else is needed then, such as the weights it started from
    else:
        check_trackers(campaign.config.tracking)
        if key := os.environ.get(KEY):
            public_key(Path(key))  # a wrong one is told now, and not when all is trained
        # Damage is told before the first step, and loader workers find all they read on local disk.
        config = campaign.config
        dataset.localise(["latents", *([config.data.text_column] if config.condition == "text" else [])])
        task = _task(campaign, plan, dataset, store, name)
        tracking = campaign.config.tracking
        if not tracking.name:  # the campaign's own
            title = campaign.store.location.rstrip("/").rpartition("/")[2]
            tracking = tracking.model_copy(update={"name": title})
        train(task, store, name, wait=wait, tracking=tracking)
    if role == "pretrain":
        hand_over(campaign)
    return read_card(store, "expert")


def _check(campaign: Campaign, run: Run) -> None:
    """Refuse a run that the campaign has not."""
    role = run.kind
    if not role.planned(campaign.config):
        what, fix = role.absent
        raise ConfigError(f"{campaign.store.location} {what}", fix)
    if not campaign.store.exists(run.plan):
        late = " with the same --set" if role.late else ""
        raise PartitionError(
            f"{campaign.store.name(run.folder)} has no island.json",
            f"run 'atoll partition {campaign.store.location}'{late} first",
        )


def _task(campaign: Campaign, plan: RunPlan, dataset: DataSet, store: Store, name: str) -> Task:
    """Network, rows and objective of a run, with the weights that it starts from."""
    config, cards = campaign.config, dict[str, Card]()
    network: nn.Module
    if plan.role == "router":
        router = config.router
        training, network = router.train, initial_router(campaign, plan.shape)
        objective = ObjectiveConfig(time=router.time, condition_dropout=router.condition_dropout)
        tree = router.model_dump(exclude={"time", "condition_dropout", "train", "share"})
    else:
        settings, training = config.denoiser(plan.role, plan.island)
        objective, tree = config.objective_of(plan.island), settings.model_dump()
        network = initial_network(settings, plan.shape, plan.init_seed)
    if plan.role == "student":
        # Its recipe names its teachers, so it does not go on under others.
        student, cards = settings_of_student(campaign), teachers(campaign, plan)
        objective = ObjectiveConfig(time=objective.time, condition_dropout=objective.condition_dropout)
        hashes = {folder: card.weights_sha256 for folder, card in cards.items()}
        lesson = student.model_dump(include={"teacher", "routing", "data_weight"})
        tree["student"] = {**lesson, "teachers": hashes}
    if plan.init == "experts":
        lay_start(campaign, store, plan, network, cards)
    plan = start(network, plan, store, name)
    recipe = Recipe(objective=objective, train=training, network=tree, plan=plan)
    labelled, device = RUNS[plan.role].task != "denoise", own_device()
    rows = TrainingRows.of(
        dataset, config.condition, recipe, clusters=labelled, encoder=token_encoder(campaign, dataset)
    )
    network = network.to(device)
    if isinstance(network, Router):
        return RouterTask(network, rows, router.pure_noise)
    if plan.role == "student":
        teacher = load_teacher(campaign, cards, device)
        task: DenoiserTask = DistillTask(network, rows, teacher, student.data_weight)
    else:
        task = DenoiserTask(network, rows)
    task.encoders = config.encoders
    return task


def check_run(role: str, expert: int | None, k: int) -> None:
    """Refuse a run that no campaign of K experts has."""
    if role not in RUNS:
        raise ConfigError(f"there is no role {role!r}", nearest(role, RUNS))
    if role == "expert" and (type(expert) is not int or not 0 <= expert < k):
        what = "which expert?" if expert is None else f"there is no expert {expert!r}"
        raise ConfigError(what, f"give --expert 0 to {k - 1}")
    if role != "expert" and expert is not None:
        raise ConfigError(f"--expert goes with 'train expert', not with 'train {role}'", "leave it out")
