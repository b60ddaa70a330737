"""One training run of a campaign: from its folder and `campaign.json` to a published network.

An expert's run opens `islands/K/` and nothing else of the store.
"""

from collections.abc import Callable, Mapping

import torch

from atoll.base.console import say
from atoll.base.device import own_device
from atoll.base.errors import ConfigError, PartitionError
from atoll.base.hashing import digest_tensors
from atoll.campaign.budget import denoiser_flops
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import start
from atoll.campaign.partition import initial_network, initial_router
from atoll.campaign.pretrain import hand_over
from atoll.campaign.publication import tidy
from atoll.campaign.runs import run_folder
from atoll.campaign.settings.loggers import TrackingConfig
from atoll.campaign.settings.train import Recipe, RunPlan, TrainConfig
from atoll.data.dataset import DataSet
from atoll.data.samples import data_shape
from atoll.data.settings import ConditionKind
from atoll.ensemble.card import Card
from atoll.ensemble.expert import published, read_card
from atoll.flow.settings import ObjectiveConfig
from atoll.networks.families import parameter_count
from atoll.networks.settings import NetworkConfig
from atoll.store.store import Store
from atoll.train.distill import DistillTask
from atoll.train.expert import DenoiserTask
from atoll.train.loggers import check_trackers
from atoll.train.loop import train
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
    folder = run_folder(role, expert)
    _check(campaign, role, folder)
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
        make: Callable[..., DenoiserTask | RouterTask] = _router_task if role == "router" else _denoiser_task
        task = make(campaign, plan, dataset, store, name)
        train(task, task.rows.recipe, store, name, wait=wait, tracking=_tracking(campaign))
    if role == "pretrain":
        hand_over(campaign)
    return read_card(store, "expert")


def train_network(
    dataset: DataSet,
    store: Store,
    *,
    network: NetworkConfig,
    samples: int,
    training: TrainConfig | None = None,
    objective: ObjectiveConfig | None = None,
    condition: ConditionKind = "none",
    seed: int = 0,
) -> Card:
    """Train one denoiser on any data set, without a campaign; called again, it goes on or is finished.

    The data set needs the columns `latents` and `split`, and `text` where texts condition it. The network
    is `Expert.load(store, "expert")` afterwards.

    Args:
        dataset: rows to learn from.
        store: where the run lives: a folder, a bucket, or memory.
        network: family and size.
        samples: training samples in all, rounded to whole steps.
        training: optimizer and loop.
        objective: schedule, prediction, times and dropout.
        condition: what the network is conditioned on.
        seed: of initial weights, order, noise, times and dropout.
    """
    training, shape = training or TrainConfig(), data_shape(dataset, condition)
    steps, flops = max(1, round(samples / training.batch)), denoiser_flops(network, shape)
    denoiser = initial_network(network, shape, seed)
    plan = RunPlan(
        role="monolith",
        rows=len(dataset.split("train")),
        steps=steps,
        batch=training.batch,
        partition="",
        seed=seed,
        init_seed=seed,
        init_sha256=digest_tensors(dict(denoiser.named_parameters())),
        parameters=parameter_count(denoiser),
        train_flops=steps * training.batch * flops.train,
        forward_flops=flops.forward,
        shape=shape,
    )
    recipe = Recipe(
        objective=objective or ObjectiveConfig(), train=training, network=network.model_dump(), plan=plan
    )
    task = DenoiserTask(denoiser.to(own_device()), TrainingRows.of(dataset, condition, recipe))
    train(task, recipe, store, "network")
    return read_card(store, "expert")


def _check(campaign: Campaign, role: str, folder: str) -> None:
    """Refuse a run that the campaign has not."""
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


def _denoiser_task(
    campaign: Campaign, plan: RunPlan, dataset: DataSet, store: Store, name: str
) -> DenoiserTask:
    config = campaign.config
    settings, training = config.denoiser(plan.role, plan.island)
    cards = teachers(campaign, plan) if plan.role == "student" else {}
    network = initial_network(settings, plan.shape, plan.init_seed)
    if plan.init == "experts":
        lay_start(campaign, store, plan, network, cards)
    plan = start(network, plan, store, name)
    network = network.to(own_device())
    recipe = Recipe(
        objective=config.objective_of(plan.island), train=training, network=settings.model_dump(), plan=plan
    )
    if plan.role == "student":
        return _student_task(campaign, network, dataset, recipe, cards)
    return DenoiserTask(network, TrainingRows.of(dataset, config.condition, recipe))


def _student_task(
    campaign: Campaign, network: torch.nn.Module, dataset: DataSet, recipe: Recipe, cards: Mapping[str, Card]
) -> DistillTask:
    """The student's task. Its recipe names its teachers, so it does not go on under others."""
    settings, objective = settings_of_student(campaign), recipe.objective
    lesson = settings.model_dump(include={"teacher", "routing", "data_weight"})
    lesson["teachers"] = {folder: card.weights_sha256 for folder, card in cards.items()}
    objective = ObjectiveConfig(time=objective.time, condition_dropout=objective.condition_dropout)
    recipe = recipe.model_copy(
        update={"objective": objective, "network": {**recipe.network, "student": lesson}}
    )
    teacher = load_teacher(campaign, cards, own_device())
    rows = TrainingRows.of(dataset, campaign.config.condition, recipe)
    return DistillTask(network, rows, teacher, settings.data_weight)


def _router_task(campaign: Campaign, plan: RunPlan, dataset: DataSet, store: Store, name: str) -> RouterTask:
    settings = campaign.config.router
    network = initial_router(campaign, plan.shape)
    plan = start(network, plan, store, name)
    recipe = Recipe(
        objective=ObjectiveConfig(time=settings.time, condition_dropout=settings.condition_dropout),
        train=settings.train,
        network=settings.model_dump(exclude={"time", "condition_dropout", "train", "share"}),
        plan=plan,
    )
    rows = TrainingRows.of(dataset, campaign.config.condition, recipe)
    return RouterTask(network.to(own_device()), rows, settings.pure_noise)


def _tracking(campaign: Campaign) -> TrackingConfig:
    """The settings, with the campaign's own name where none is set."""
    settings = campaign.config.tracking
    name = settings.name or campaign.store.location.rstrip("/").rpartition("/")[2]
    return settings.model_copy(update={"name": name})


def parse_role(role: str, island: int | None, k: int) -> None:
    """Check what `atoll train` was asked for."""
    if role == "expert" and (island is None or not 0 <= island < k):
        what = "which expert?" if island is None else f"there is no expert {island}"
        raise ConfigError(what, f"give --expert 0 to {k - 1}")
    if role != "expert" and island is not None:
        raise ConfigError(f"--expert goes with 'train expert', not with 'train {role}'", "leave it out")
