"""The partition stage: cut the data set and give every run a folder with all it needs."""

from dataclasses import dataclass

import numpy as np
import torch

from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError
from atoll.base.hashing import digest_tensors
from atoll.base.rng import seed_of
from atoll.base.text import few
from atoll.campaign.budget import Budget, Share, divide, router_arguments
from atoll.campaign.folder import Campaign
from atoll.campaign.initial import Checkpoints, start_of
from atoll.campaign.runs import Run, RunPlan, experts_of, made_by, training_columns, wanted_columns
from atoll.data import partition as partitions
from atoll.data.cluster_map import cluster_map
from atoll.data.columns import Column
from atoll.data.dataset import DataSet
from atoll.data.duplicates import COLUMN, about
from atoll.data.formats import ClusterMap
from atoll.data.partition import Partition
from atoll.data.samples import WEIGHTS, data_shape, weights_of
from atoll.data.settings import IngestConfig, features_column
from atoll.data.subsets import union, write_subset
from atoll.networks.checkpoint import compare
from atoll.networks.families import family, parameter_count
from atoll.networks.init import initialise
from atoll.networks.pipelines import check_data
from atoll.networks.router import Router
from atoll.networks.settings import DataShape, NetworkConfig


def make_islands(campaign: Campaign) -> Partition:
    """Cut the data set, write `partition/`, the islands' data sets, and every run's `island.json`.

    Finished parts are left alone; `partition/partition.json` comes last and says that all is there.
    """
    store, config = campaign.store, campaign.config
    store.sweep()
    if campaign.is_partitioned:
        partition = partitions.load(store)
        say(f"partition: finished already, {partition.k} clusters of {sum(partition.sizes):,} training rows")
        if campaign.has_dataset() and not partition.weighs_as(campaign.dataset()):
            say("  warning: the data set's weights have changed; this campaign keeps those it was cut with")
        if config.student is not None and not store.exists("student/island.json"):
            _add_student(campaign, partition)
        return partition
    dataset = campaign.dataset()
    how, encoder = config.data.dedupe, config.partition.encoder
    if how and not made_by(dataset, COLUMN, about(dataset, how, encoder)):
        raise DataError("the data set is not deduplicated as data.dedupe says", "run 'atoll data prepare'")
    columns = island_columns(campaign, dataset)
    features = features_of(campaign, dataset)
    weights = weights_of(dataset) if config.data.weighted else None
    partition = partitions.make(dataset, features, config.partition, config.seed, weights)
    shape = data_shape(dataset, config.condition, config.data.text_column)
    budget = divide(config, shape, partition.masses, list(partition.about.buckets.values()))
    campaign.freeze()

    plans, parts = _Plans(campaign, partition, shape, Checkpoints(store.location)), []
    for number in range(partition.k):
        run = Run("expert", number)
        parts.append(write_subset(dataset, partition.rows(number), store, f"{run.folder}/data", columns))
        plans.write(run, partition.sizes[number], budget.experts[number])
    for role, share in budget.whole().items():
        plans.write_whole(role, parts, columns, share)
    found = cluster_map(dataset, features, partition.clusters, partition.centroids, partition.k)
    store.put_json(ClusterMap.PLACE, found.to_json())
    partitions.save(partition, store, dataset)
    _tell(partition, budget, config.budget.compute == "equal")
    return partition


def features_of(campaign: Campaign, dataset: DataSet) -> Column | None:
    """Features that rows are clustered by, or, for other methods, that the clusters are looked at with."""
    config = campaign.config.partition
    name = features_column(config.encoder)
    return dataset.column(name) if config.method == "kmeans" or dataset.has_column(name) else None


def _add_student(campaign: Campaign, partition: Partition) -> None:
    """The student's folder, in a campaign that was partitioned without one."""
    store, config = campaign.store, campaign.config
    parts = [DataSet.open(store, f"{run.folder}/data") for run in experts_of(partition.k)]
    shape = RunPlan.read(store, Run("expert", 0).plan).shape
    budget = divide(config, shape, partition.masses, list(partition.about.buckets.values()))
    assert budget.student is not None
    plans = _Plans(campaign, partition, shape, Checkpoints(store.location))
    plans.write_whole("student", parts, parts[0].column_names(), budget.student)
    say(_of_student(budget.student, budget))


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


def island_columns(campaign: Campaign, dataset: DataSet) -> list[str]:
    """Name the columns that an island needs; refuses data made with other settings than the campaign's."""
    ingested, config = dataset.manifest.config, campaign.config
    if config.data.source is not None and ingested:
        settings = IngestConfig.parse(ingested, dataset.store.name("manifest.json"))  # perhaps older
        if settings != config.data.ingest:
            fix = "put data.ingest back, or choose another data.path"
            raise DataError(
                f"{dataset.store.location} was ingested with other settings than data.ingest has now", fix
            )
    for name, producer in wanted_columns(config).items():
        if not made_by(dataset, name, producer):
            command = "embed" if name.startswith("features-") else "encode"
            what = "of other settings" if dataset.has_column(name) else "missing"
            raise DataError(
                f"column {name!r} of {dataset.store.location} is {what}", f"run 'atoll data {command}'"
            )
    return ["split", *training_columns(config), *([WEIGHTS] if config.data.weighted else [])]


def write_clusters(whole: DataSet, parts: list[DataSet], partition: Partition) -> None:
    """Write the `clusters` column of a data set made of the islands' shards in order."""
    numbers = np.repeat(np.arange(len(parts), dtype=np.int16), [len(part) for part in parts])
    whole.write_values("clusters", {"name": "partition", "hash": partition.hash}, numbers)


@dataclass
class _Plans:
    """Writes `island.json` of every run, and `init/` of those that start from a checkpoint."""

    campaign: Campaign
    partition: Partition
    shape: DataShape
    checkpoints: Checkpoints

    def write_whole(self, role: str, parts: list[DataSet], columns: list[str], share: Share) -> None:
        """Data and plan of a run on all the data."""
        student = self.campaign.config.student
        if role == "student" and student is not None:
            if student.stock:
                network, producer = (
                    self.campaign.config.denoiser(role)[0],
                    parts[0].column("latents").meta.producer,
                )
                check_data(network.family, producer, self.shape.classes, network.patch)
            self.campaign.freeze_student()
        whole = union(self.campaign.store, f"{role}/data", parts, columns)
        write_clusters(whole, parts, self.partition)
        self.write(Run(role), sum(self.partition.sizes), share)

    def write(self, run: Run, rows: int, share: Share) -> None:
        config, (role, expert) = self.campaign.config, run
        start, settings = start_of(config, role, expert), config.denoiser(role, expert)[0]
        initial: torch.nn.Module
        if role == "router":
            initial = initial_router(self.campaign, self.shape)
        else:
            initial = initial_network(settings, self.shape, config.seed)
        if start == "pretrain":
            self._check_pretrain(initial, settings, expert)
        if start == "checkpoint":
            store = self.campaign.store.sub(run.folder)
            weights = self.checkpoints.start(store, initial, settings, self.partition.hash)
        else:
            weights = digest_tensors(dict(initial.named_parameters()))
        plan = RunPlan(
            role=role,
            island=expert,
            rows=rows,
            weighted=self.partition.about.weights is not None,
            steps=share.steps,
            batch=share.batch,
            partition=self.partition.hash,
            seed=seed_of(config.seed, f"run/{run.folder}"),
            init=start,
            init_seed=config.seed,
            init_sha256=None if start in ("pretrain", "experts") else weights,
            parameters=parameter_count(initial),
            train_flops=share.train_flops,
            forward_flops=share.flops.forward,
            shape=self.shape,
        )
        self.campaign.store.put_json(run.plan, plan.to_json())

    def _check_pretrain(self, initial: torch.nn.Module, settings: NetworkConfig, island: int | None) -> None:
        """Tell before shared pretraining is trained that an expert could take nothing over from it."""
        common = self.campaign.config.network
        if settings == common:
            return
        with torch.device("meta"):
            pretrain = family(common.family).build(common, self.shape)
        if not compare(initial, dict(pretrain.named_parameters())).kept:
            raise ConfigError(
                f"islands.{island}.network has no tensor of the pretrained shapes, to start from them",
                "give it the campaign's heads and head_width, or set budget.pretrain=0",
            )


def _tell(partition: Partition, budget: Budget, equal: bool) -> None:
    about, total, weight = partition.about, sum(partition.sizes), sum(partition.masses)
    say(f"partition {partition.hash[:12]}: {partition.k} clusters of {total:,} training rows")
    for number, (size, share) in enumerate(zip(partition.sizes, budget.experts, strict=True)):
        part = f", {partition.masses[number] / weight:6.1%} of the weight" if about.masses else ""
        of = f", {about.column or 'label'} {few(about.values[number])}" if about.values else ""
        steps = f"{share.steps:,} steps of {share.batch}"
        say(f"  cluster {number}: {size:6,} rows {size / total:6.1%}{part}, {steps}{of}")
    if about.masses and not equal:
        say("  an expert's steps follow the weights of its rows, not how many they are (data.weighted)")
    for bucket, rows in about.buckets.items():
        say(f"  {bucket}: {few([f'{number:,.0f}' for number in rows], 16)} rows by cluster")
        short = [str(n) for n, number in enumerate(rows) if 0 < number < budget.experts[n].batch]
        if short:
            say(f"  warning: fewer of it than a step in cluster {few(short)}: they wait until they fill one")
    for warning in about.warnings:
        say(f"  warning: {warning}")
    if (inertia := about.inertia) is not None:
        cost = f", {inertia.clusters / inertia.free - 1:+.2%} for the limits" if inertia.free else ""
        say(f"  inertia {inertia.clusters:.4g}, of random clusters {inertia.random:.4g}{cost}")
    if budget.pretrain:
        share = budget.pretrain
        say(f"  shared pretraining: {share.steps:,} steps of {share.batch} on all rows, before the experts")
    parts = "experts + router + pretraining" if budget.pretrain else "experts + router"
    say(
        f"  router: {budget.router.steps:,} steps of {budget.router.batch}; {parts} cost "
        f"{budget.ratio():.3f} of the monolith's {budget.monolith.train_flops:.3g} FLOPs"
    )
    if budget.student:
        say(_of_student(budget.student, budget))


def _of_student(share: Share, budget: Budget) -> str:
    part = share.train_flops / budget.monolith.train_flops
    return (
        f"  student: {share.steps:,} steps of {share.batch} after the experts; with its teachers it costs"
        f" {part:.3f} of the monolith's FLOPs, beyond theirs"
    )
