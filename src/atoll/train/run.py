"""One training run of a campaign: from its folder and `campaign.json` to a published network.

An expert's run opens `islands/K/` and nothing else of the store.
"""

import os
from dataclasses import replace
from pathlib import Path

from torch import nn

from atoll.base.device import own_device
from atoll.base.processes import ProcessGroup, joined
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import copy_initial_weights, initial_network, initial_router, with_initial_weights
from atoll.campaign.publication import KEY, trained_already
from atoll.campaign.roles import RUNS
from atoll.campaign.runs import Recipe, RunPlan, run_to_train
from atoll.campaign.token_encoder import token_encoder
from atoll.data.dataset import DataSet
from atoll.flow.settings import ObjectiveConfig
from atoll.model.card import Card
from atoll.model.checkpoint import Checkpoint
from atoll.networks.router import Router
from atoll.store.signatures import check_key
from atoll.store.store import Store
from atoll.train.distill import DistillTask, load_teacher, teachers, write_initial_weights
from atoll.train.loggers import check_trackers
from atoll.train.loop import train
from atoll.train.rows import TrainingRows
from atoll.train.tasks import DenoiserTask, RouterTask, Task


def train_run(campaign: Campaign, role: str, expert: int | None = None, *, wait: bool = False) -> Card:
    """Train one run of a campaign, or go on with it; the card of the finished network.

    Shared pretraining that is finished hands its weights over to the experts.
    """
    run, config, root = run_to_train(campaign, role, expert), campaign.config, campaign.store

    # An expert opens its own folder and nothing else, so that its island needs no other; the runs on all rows
    # read the islands' shards by path.
    store = root.sub(run.folder)
    store.sweep()
    store.check_folder("run")
    plan = RunPlan.read(store, "island.json")
    own = run.kind.rows == "cluster"
    dataset = DataSet.open(store, "data") if own else DataSet.open(root, f"{run.folder}/data")
    if not trained_already(campaign, run):
        check_trackers(config.tracking)
        if key := os.environ.get(KEY):
            check_key(Path(key))  # a wrong one is told now, and not when all is trained
        tracking = config.tracking
        if not tracking.name:  # the campaign's own
            tracking = tracking.model_copy(update={"name": root.location.rstrip("/").rpartition("/")[2]})
        columns = ["latents", *([config.data.text_column] if config.condition == "text" else [])]
        with joined(config.training(*run).parallel.collective_timeout_s) as group:
            # Damage is told before the first step, and loader workers find all they read on local disk. What
            # the first process of a machine has fetched and hashed, its others only open.
            first = os.environ.get("LOCAL_RANK", "0") == "0"
            group.each(lambda: dataset.localise(columns) if first else None)
            dataset.localise(columns, check=False)
            task = _task(campaign, plan, dataset, store, run.name, group)
            train(task, store, run.name, wait=wait, tracking=tracking)
    if role == "pretrain" and os.environ.get("RANK", "0") == "0":
        copy_initial_weights(campaign)
    return Checkpoint(store, "expert").card


def _task(
    campaign: Campaign, plan: RunPlan, dataset: DataSet, store: Store, name: str, group: ProcessGroup
) -> Task:
    config, learns = campaign.config, RUNS[plan.role].task
    network: nn.Module
    if learns == "route":
        router = config.router
        training, network = router.train, initial_router(campaign, plan.shape)
        objective = ObjectiveConfig(time=router.time, condition_dropout=router.condition_dropout)
        tree = router.model_dump(exclude={"time", "condition_dropout", "train", "share"})
    else:
        settings, training = config.denoiser(plan.role, plan.island)
        objective, tree = config.objective_of(plan.role, plan.island), settings.model_dump()
        network = initial_network(settings, plan.shape, plan.init_seed)
    if learns == "distill":
        # Its recipe names its teachers, so that a resume under others is refused.
        student, cards = config.student, teachers(campaign, plan)
        assert student is not None
        sampling = student.sampling(config.objective.time.shift)
        hashes = {folder: card.weights_sha256 for folder, card in cards.items()}
        told = {"teacher", "routing", "data_weight", "guidance", "teacher_steps", "reuse"}
        tree["student"] = {**student.model_dump(include=told), "sampling": sampling, "teachers": hashes}
        if plan.init == "experts":
            group.once(lambda: write_initial_weights(campaign, store, plan, network, cards))
    plan = with_initial_weights(network, plan, store, name)
    recipe = Recipe(objective=objective, train=training, network=tree, plan=plan)
    encoder, labelled = token_encoder(campaign, dataset), learns != "denoise"
    rows = TrainingRows.of(dataset, config.condition, recipe, clusters=labelled, encoder=encoder)
    if isinstance(network, Router):
        # A router that was never asked at exactly t = 1, where `once` asks, guesses there.
        return RouterTask(network, replace(rows, pure_noise=config.router.pure_noise))
    task = DenoiserTask(network, rows)
    if learns == "distill" and student is not None:
        task = DistillTask(network, rows, load_teacher(campaign, rows.train.null, own_device()), student)
    task.encoders = config.encoders
    return task
