"""One training run of a campaign: from its folder and `campaign.json` to a published network.

An expert's run opens `islands/K/` and nothing else of the store.
"""

from typing import Any

from atoll.base.console import say
from atoll.base.errors import ConfigError, PartitionError
from atoll.campaign.campaign import Campaign
from atoll.campaign.islands import initial_network, initial_router, run_folder
from atoll.campaign.seed import hand_over
from atoll.campaign.start import start
from atoll.data.dataset import DataSet
from atoll.data.samples import Samples
from atoll.ensemble.expert import published
from atoll.flow.objective import ObjectiveConfig
from atoll.networks.families import DataShape, NetworkConfig
from atoll.store.store import Store
from atoll.train.expert import DenoiserTask
from atoll.train.loop import train
from atoll.train.parallel import own_device
from atoll.train.publication import tidy
from atoll.train.router import RouterTask
from atoll.train.settings import Recipe, RunPlan, TrainConfig
from atoll.train.track import TrackingConfig


def train_run(campaign: Campaign, role: str, island: int | None = None, *, wait: bool = False) -> None:
    """Train an island's expert, the router, the monolith or the seed; go on where an earlier run stopped.

    A seed that is finished hands its weights over to the islands.

    Raises:
        PartitionError: the campaign has not been partitioned, has no such island, or the run starts from
            weights that are not there.
        ConfigError: a tracker is wanted whose package or key is not there.
    """
    folder = run_folder(role, island)
    if role == "seed" and not campaign.config.budget.seed:
        raise ConfigError(
            f"budget.seed is 0 in {campaign.store.location}: it has no seed run",
            "start a campaign with, for example, --set budget.seed=0.3",
        )
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
    if published(store, "expert"):
        tidy(store)
        say(f"{name}: finished already")  # nothing else is needed then, such as the weights it started from
    else:
        campaign.config.tracking.check()
        # Damage is told before the first step, and loader workers find all they read on local disk.
        dataset.localise(["latents", *(["text"] if campaign.config.condition == "text" else [])])
        if role == "router":
            _train_router(campaign, plan, dataset, store, wait)
        else:
            network, settings = _settings(campaign, role, island)
            _train_denoiser(campaign, plan, dataset, store, network, settings, name, wait)
    if role == "seed":
        hand_over(campaign)


def _settings(campaign: Campaign, role: str, island: int | None) -> tuple[NetworkConfig, TrainConfig]:
    config = campaign.config
    if island is not None:
        return config.island(island)
    if role == "seed":
        return config.network, config.train.model_copy(update={"lr_schedule": config.budget.seed_lr_schedule})
    return config.network, config.train


def _train_denoiser(
    campaign: Campaign,
    plan: RunPlan,
    dataset: DataSet,
    store: Store,
    settings: NetworkConfig,
    training: TrainConfig,
    name: str,
    wait: bool,
) -> None:
    shape = DataShape(**plan.shape)
    network = initial_network(settings, shape, plan.init_seed)
    plan = start(network, plan, store, name)
    network = network.to(own_device())
    objective = campaign.config.objective_of(plan.island)
    recipe = Recipe(objective=objective, train=training, network=settings.model_dump(), plan=plan)
    rows, heldout = _splits(campaign, dataset, shape)
    task = DenoiserTask(network, settings.family, rows, heldout, recipe, *_producers(dataset))
    train(task, recipe, store, name, wait=wait, tracking=_tracking(campaign))


def _train_router(campaign: Campaign, plan: RunPlan, dataset: DataSet, store: Store, wait: bool) -> None:
    shape, own = DataShape(**plan.shape), campaign.config.router
    network = initial_router(campaign, shape)
    plan = start(network, plan, store, "router")
    network = network.to(own_device())
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


def _producers(dataset: DataSet) -> tuple[dict[str, Any], dict[str, Any] | None]:
    text = dataset.column("text").meta.producer if dataset.has_column("text") else None
    return dataset.column("latents").meta.producer, text


def parse_role(role: str, island: int | None, k: int) -> None:
    """Check what `atoll train` was asked for."""
    if role == "expert" and (island is None or not 0 <= island < k):
        what = "which island?" if island is None else f"there is no island {island}"
        raise ConfigError(what, f"give --island 0 to {k - 1}")
    if role != "expert" and island is not None:
        raise ConfigError(f"--island goes with 'train expert', not with 'train {role}'", "leave it out")
