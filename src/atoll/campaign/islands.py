"""The partition stage: cut the data set and give every run a folder with all it needs."""

import torch

from atoll.base.console import say
from atoll.base.errors import DataError
from atoll.base.hashing import digest_tensors
from atoll.base.rng import seed_of
from atoll.campaign.budget import Budget, Share, divide, router_arguments
from atoll.campaign.campaign import Campaign
from atoll.data import partition as partitions
from atoll.data.columns import write_column
from atoll.data.dataset import DataSet, union, write_subset
from atoll.data.embed import features_column
from atoll.data.partition import Partition
from atoll.data.samples import data_shape
from atoll.networks.families import DataShape, NetworkConfig, family
from atoll.networks.init import initialise
from atoll.networks.router import Router
from atoll.train.settings import RunPlan


def run_folder(role: str, island: int | None = None) -> str:
    """Folder of a run inside the campaign."""
    return f"islands/{island}" if role == "expert" else role


def make_islands(campaign: Campaign) -> Partition:
    """Cut the data set, write `partition/`, the islands' data sets, and every run's `island.json`.

    Finished parts are left alone; `partition/partition.json` comes last and says that all is there.
    """
    store, config = campaign.store, campaign.config
    if store.exists("partition/partition.json"):
        made = partitions.load(store)
        say(f"partition: finished already, {made.k} clusters {made.sizes}")
        return made
    dataset = campaign.dataset()
    columns = _columns(campaign, dataset)
    name = features_column(config.partition.encoder)
    features = dataset.column(name) if config.partition.method == "kmeans" else None
    made = partitions.make(dataset, features, config.partition, config.seed)
    shape = data_shape(dataset, config.condition)
    budget = divide(config, shape, made.sizes)
    campaign.freeze()

    parts = []
    for number in range(made.k):
        rows = (made.clusters == number).nonzero()[0]
        parts.append(write_subset(dataset, rows, store, f"islands/{number}/data", columns))
        network, _ = config.island(number)
        digest = init_digest(network, shape, config.seed)
        _write_plan(
            campaign, made, shape, "expert", number, made.sizes[number], budget.experts[number], digest
        )
    for role in ("router", "monolith"):
        whole = union(store, f"{role}/data", parts, columns)
        _write_clusters(whole, parts, made)
    _write_plan(
        campaign, made, shape, "router", None, sum(made.sizes), budget.router, _router_digest(campaign, shape)
    )
    digest = init_digest(config.network, shape, config.seed)
    _write_plan(campaign, made, shape, "monolith", None, sum(made.sizes), budget.monolith, digest)
    partitions.save(made, store, dataset)
    _tell(made, budget)
    return made


def initial_network(config: NetworkConfig, shape: DataShape, seed: int) -> torch.nn.Module:
    """A denoiser with its published initialisation."""
    network = family(config.family).build(config, shape)
    initialise(network, seed)
    return network


def initial_router(campaign: Campaign, shape: DataShape) -> Router:
    """The router with its initialisation."""
    network: Router = Router(**router_arguments(campaign.config, shape))
    initialise(network, campaign.config.seed)
    return network


def init_digest(config: NetworkConfig, shape: DataShape, seed: int) -> str:
    """Digest of a denoiser's initial weights."""
    return digest_tensors(dict(initial_network(config, shape, seed).named_parameters()))


def _router_digest(campaign: Campaign, shape: DataShape) -> str:
    return digest_tensors(dict(initial_router(campaign, shape).named_parameters()))


def _columns(campaign: Campaign, dataset: DataSet) -> list[str]:
    """Columns that an island needs."""
    needed = ["latents", "split"] + (["text"] if campaign.config.condition == "text" else [])
    for name in needed:
        if not dataset.has_column(name):
            raise DataError(f"{dataset.store.root} has no column {name!r}", "run 'atoll data encode' first")
    name = features_column(campaign.config.partition.encoder)
    if campaign.config.partition.method == "kmeans" and not dataset.has_column(name):
        raise DataError(f"{dataset.store.root} has no column {name!r}", "run 'atoll data embed' first")
    return needed


def _write_clusters(whole: DataSet, parts: list[DataSet], made: Partition) -> None:
    """The `clusters` column of a data set made of the islands' shards in order."""
    numbers = [k for k, part in enumerate(parts) for _ in part.shards]

    def compute(shard: int) -> dict[str, torch.Tensor]:
        rows = whole.shards[shard].rows
        return {"values": torch.full((rows,), numbers[shard], dtype=torch.int16)}

    write_column(whole, "clusters", {"name": "partition", "hash": made.hash}, compute)


def _write_plan(
    campaign: Campaign,
    made: Partition,
    shape: DataShape,
    role: str,
    island: int | None,
    rows: int,
    share: Share,
    digest: str,
) -> None:
    config, folder = campaign.config, run_folder(role, island)
    plan = RunPlan(
        role=role,  # type: ignore[arg-type]
        island=island,
        rows=rows,
        steps=share.steps,
        batch=share.batch,
        partition=made.hash,
        seed=seed_of(config.seed, "run/" + folder),
        init_seed=config.seed,
        init_sha256=digest,
        train_flops=share.train_flops,
        forward_flops=share.flops.forward,
        shape=vars(shape),
    )
    campaign.store.put_json(f"{folder}/island.json", plan.model_dump())


def _tell(made: Partition, budget: Budget) -> None:
    total = sum(made.sizes)
    say(f"partition {made.hash[:12]}: {made.k} clusters of {total:,} training rows")
    for number, (size, share) in enumerate(zip(made.sizes, budget.experts, strict=True)):
        say(f"  cluster {number}: {size:6,} rows {size / total:6.1%}, {share.steps:,} steps of {share.batch}")
    for warning in made.warnings():
        say(f"  warning: {warning}")
    say(
        f"  router: {budget.router.steps:,} steps of {budget.router.batch}; experts + router cost "
        f"{budget.ratio():.3f} of the monolith's {budget.monolith.train_flops:.3g} FLOPs"
    )
