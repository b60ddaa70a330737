"""One training run of a campaign: from its folder and `campaign.json` to a published network.

An expert's run opens `islands/K/` and nothing else of the store.
"""

from typing import Any

import torch

from atoll.base.console import say
from atoll.base.errors import ConfigError, PartitionError
from atoll.base.hashing import digest_tensors
from atoll.campaign.campaign import Campaign
from atoll.campaign.islands import initial_network, initial_router, run_folder
from atoll.data.dataset import DataSet
from atoll.data.samples import Samples
from atoll.ensemble.expert import published
from atoll.flow.objective import ObjectiveConfig
from atoll.networks.families import DataShape, NetworkConfig
from atoll.store.store import Store
from atoll.train.expert import DenoiserTask
from atoll.train.loop import train
from atoll.train.router import RouterTask
from atoll.train.settings import Recipe, RunPlan, TrainConfig


def train_run(campaign: Campaign, role: str, island: int | None = None) -> None:
    """Train the expert of an island, the router, or the monolith; go on where an earlier run stopped.

    Raises:
        PartitionError: the campaign has not been partitioned, or has no such island.
    """
    folder = run_folder(role, island)
    if not campaign.store.exists(f"{folder}/island.json"):
        raise PartitionError(
            f"{campaign.store.name(folder)} has no island.json", "run 'atoll partition' first"
        )
    store = campaign.store.sub(folder)
    plan = RunPlan.parse(store.get_json("island.json"), f"{folder}/island.json")
    # An expert sees its own folder; router and monolith read the islands' shards by path.
    dataset = (
        DataSet.open(store, "data") if role == "expert" else DataSet.open(campaign.store, f"{folder}/data")
    )
    name = folder.replace("islands/", "island ")
    if not published(store, "expert"):
        # Damage is told before the first step, and loader workers find all they read on local disk.
        dataset.localise(["latents", *(["text"] if campaign.config.condition == "text" else [])])
    if role == "router":
        _train_router(campaign, plan, dataset, store)
    else:
        network, settings = campaign.config.island(island) if island is not None else _common(campaign)
        _train_denoiser(campaign, plan, dataset, store, network, settings, name)


def _common(campaign: Campaign) -> tuple[NetworkConfig, TrainConfig]:
    return campaign.config.network, campaign.config.train


def _train_denoiser(
    campaign: Campaign,
    plan: RunPlan,
    dataset: DataSet,
    store: Store,
    settings: NetworkConfig,
    training: TrainConfig,
    name: str,
) -> None:
    shape = DataShape(**plan.shape)
    network = initial_network(settings, shape, plan.init_seed).to(_device())
    _check_init(network, plan, name)
    recipe = Recipe(
        objective=campaign.config.objective, train=training, network=settings.model_dump(), plan=plan
    )
    rows, heldout = _splits(campaign, dataset, shape)
    task = DenoiserTask(network, settings.family, rows, heldout, recipe, *_producers(dataset))
    train(task, recipe, store, name)


def _train_router(campaign: Campaign, plan: RunPlan, dataset: DataSet, store: Store) -> None:
    shape, own = DataShape(**plan.shape), campaign.config.router
    network = initial_router(campaign, shape).to(_device())
    _check_init(network, plan, "router")
    settings = own.model_dump(exclude={"time", "condition_dropout", "train", "share"})
    objective = ObjectiveConfig(time=own.time, condition_dropout=own.condition_dropout)
    recipe = Recipe(objective=objective, train=own.train, network=settings, plan=plan)
    rows, heldout = _splits(campaign, dataset, shape)
    clusters = dataset.column("clusters").read(range(len(dataset))).long()
    train(
        RouterTask(network, rows, heldout, clusters, recipe, own.pure_noise, *_producers(dataset)),
        recipe,
        store,
        "router",
    )


def _splits(campaign: Campaign, dataset: DataSet, shape: DataShape) -> tuple[Samples, Samples]:
    kind = campaign.config.condition
    return (
        Samples(dataset, dataset.split("train"), kind, shape),
        Samples(dataset, dataset.split("heldout"), kind, shape),
    )


def _producers(dataset: DataSet) -> tuple[dict[str, Any], dict[str, Any] | None]:
    text = dataset.column("text").meta.producer if dataset.has_column("text") else None
    return dataset.column("latents").meta.producer, text


def _check_init(network: torch.nn.Module, plan: RunPlan, name: str) -> None:
    if digest_tensors(dict(network.named_parameters())) != plan.init_sha256:
        say(f"{name}: warning: this machine draws other initial weights than the one that made the partition")


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def parse_role(role: str, island: int | None, k: int) -> None:
    """Check what `atoll train` was asked for."""
    if role == "expert" and (island is None or not 0 <= island < k):
        what = "which island?" if island is None else f"there is no island {island}"
        raise ConfigError(what, f"give --island 0 to {k - 1}")
    if role != "expert" and island is not None:
        raise ConfigError(f"--island goes with 'train expert', not with 'train {role}'", "leave it out")
