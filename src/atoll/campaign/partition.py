"""The partition stage: cut the data set and give every run a folder with all it needs."""

import numpy as np

from atoll.base.console import say
from atoll.base.errors import DataError
from atoll.base.hashing import digest_tensors, sha256
from atoll.base.rng import seed_of
from atoll.base.text import many, shorten
from atoll.campaign.budget import Budget, divide, flops_ratio, too_small
from atoll.campaign.folder import Campaign, finished_origin
from atoll.campaign.initial import Checkpoints, initial_network, initial_router
from atoll.campaign.runs import (
    Run,
    RunPlan,
    experts_of,
    made_by,
    partition_finished,
    runs_of,
    training_columns,
    wanted_columns,
)
from atoll.campaign.settings.campaign import CampaignConfig
from atoll.data import partition as partitions
from atoll.data.cluster_map import cluster_map
from atoll.data.columns import Column
from atoll.data.dataset import CAPTION, SPLITS, WEIGHTS, DataSet
from atoll.data.duplicates import dedupe_producer
from atoll.data.formats import ClusterMap
from atoll.data.partition import Partition
from atoll.data.samples import data_shape
from atoll.data.settings import IngestConfig, features_column
from atoll.data.subsets import union, write_subset
from atoll.data.weights import DUPLICATES, PLAIN, opt_out, producer_of
from atoll.networks.families import parameter_count
from atoll.networks.pipelines import check_data
from atoll.networks.settings import DataShape


def make_islands(campaign: Campaign) -> Partition:
    """Cut the data set, write `partition/`, the islands' data sets, and every run's `island.json`.

    Finished parts are left alone; `partition/partition.json` comes last and says that all is there.
    """
    store, config = campaign.store, campaign.config
    store.sweep()
    if campaign.is_partitioned:
        partition = partitions.load(store)
        # Runs that the settings ask for only now.
        if not partition_finished(campaign):
            late = [run for run in runs_of(config) if run.kind.late and not store.exists(run.plan)]
            # From what the islands hold: the data set that was cut may be gone by now.
            parts = [DataSet.open(store, f"{run.folder}/data") for run in experts_of(partition.k)]
            shape = RunPlan.read(store, Run("expert", 0).plan).shape
            budget = divide(config, shape, partition.masses, list(partition.about.buckets.values()))
            if config.origin:
                finished_origin(config, store.location)  # which may have no student
            late_budget, checkpoints = {run: budget[run] for run in late}, Checkpoints(campaign)
            checkpoints.check(late, shape, parts[0].column("latents").meta.producer)
            _write_runs(partition, shape, late_budget, parts, checkpoints)
            for run in late:
                _say_extra(run, budget)
        return partition
    dataset = campaign.dataset()
    how, encoder = config.data.dedupe, config.partition.encoder
    if how and not made_by(dataset, DUPLICATES, dedupe_producer(dataset, how, encoder)):
        raise DataError("the data set is not deduplicated as data.dedupe says", "run 'atoll data prepare'")
    columns = island_columns(campaign, dataset)
    features = features_of(campaign, dataset)
    if config.origin:
        partition = partition_of_origin(campaign, dataset)
    else:
        partition = partitions.make(dataset, features, config.partition, config.seed, config.data.weighted)
    shape = data_shape(dataset, config.condition, config.data.text_column, config.network.guidance)
    budget = divide(config, shape, partition.masses, list(partition.about.buckets.values()))
    checkpoints = Checkpoints(campaign)
    checkpoints.check(budget, shape, dataset.column("latents").meta.producer)
    # From here on files of the runs are written, which settings that change later would not agree with.
    campaign.freeze()

    # Copies, and not references into the data set: an island has to train where nothing else can be seen.
    parts = [
        write_subset(dataset, partition.rows(number, dataset), store, f"{run.folder}/data", columns)
        for number, run in enumerate(experts_of(partition.k))
    ]
    _write_runs(partition, shape, budget, parts, checkpoints)
    # The partition comes last: what is killed before it starts anew, and takes over what is there already.
    overview = cluster_map(dataset, features, partition.clusters, partition.centroids, partition.k)
    store.put_json(ClusterMap.PLACE, overview.to_json())
    partitions.save(partition, store, dataset)
    _say_partition(partition, budget, config)
    return partition


def partition_of_origin(campaign: Campaign, dataset: DataSet) -> Partition:
    """The partition of the campaign that this one goes on from; rows on no island there are left out."""
    origin = finished_origin(campaign.config, campaign.store.location)
    partition, places = partitions.load(origin.store), dict[str, int]()
    for number, run in enumerate(experts_of(partition.k)):
        part = DataSet.open(origin.store, f"{run.folder}/data")
        if part.manifest.source.get("fingerprint") != dataset.manifest.source.get("fingerprint"):
            what = f"{dataset.store.location} is of another source than the data of {origin.store.location}"
            raise DataError(what, "ingest the same pictures, with the same columns of captions and ids")
        sides = number * len(SPLITS) + part.sides.astype(np.int64)
        places |= dict(zip(part.ids, sides.tolist(), strict=True))
    known = np.array([places.get(row, -1) for row in dataset.ids], dtype=np.int64)
    numbers, before = np.divmod(known, len(SPLITS))
    # Such as duplicates, and rows that opted out: they must not come back by being ingested again.
    out = numbers < 0
    # Rows that the first weights were learned from must not measure what is learned from here on, though
    # another share may be held out here, and other rows be found to be duplicates.
    split = np.where(out, dataset.sides, before).astype(np.int8)
    if moved := int((split != dataset.sides).sum()):
        say(f"{many(moved, 'row')} put on the side of the split that {origin.store.location} has them on")
        dataset.write_values("split", {"name": "origin", "hash": sha256(split.tobytes())}, split)
    if (out & (dataset.weights > 0)).any():
        say(f"{many(int(out.sum()), 'row')} on no island of {origin.store.location} left out")
        opt_out(dataset, out)  # a filter or a rebalance must not bring them back either
    return partitions.carried(partition, numbers, dataset, campaign.config.data.weighted)


def _write_runs(
    partition: Partition, shape: DataShape, budget: Budget, parts: list[DataSet], checkpoints: Checkpoints
) -> None:
    """Write plans, `init/` where a run starts from a checkpoint, and the data of runs on all rows."""
    campaign, columns = checkpoints.campaign, parts[0].column_names()
    store, config = campaign.store, campaign.config
    for run, part in budget.items():
        role, rows = run.kind, sum(partition.sizes)
        if run.expert is not None:
            rows = partition.sizes[run.expert]
        else:
            if role.task == "distill" and config.student is not None:
                # What a stock pipeline could not draw with is told before hours of training.
                if config.student.stock:
                    network, producer = config.denoiser(run.role)[0], parts[0].column("latents").meta.producer
                    check_data(network.family, producer, shape.classes, network.patch)
                campaign.freeze_student()
            write_clusters(union(store, f"{run.folder}/data", parts, columns), parts, partition)

        # The weights are drawn here too: their hash tells an island whether its machine draws the same.
        settings = config.denoiser(*run)[0]
        start, routes = run.init(config), role.task == "route"
        initial = initial_router(campaign, shape) if routes else initial_network(settings, shape, config.seed)
        if start == "checkpoint":
            weights = checkpoints.publish(run, initial, partition.hash, shape)
        else:
            weights = digest_tensors(dict(initial.named_parameters()))
        plan = RunPlan(
            role=run.role,
            island=run.expert,
            rows=rows,
            weighted=bool(partition.about.masses),
            steps=part.steps,
            batch=part.batch,
            partition=partition.hash,
            seed=seed_of(config.seed, f"run/{run.folder}"),
            init=start,
            init_seed=config.seed,
            # Those weights exist only when the runs that they come from have published.
            init_sha256=None if start in ("pretrain", "experts") else weights,
            parameters=(trained := parameter_count(initial)),
            frozen=sum(p.numel() for p in initial.parameters()) - trained,
            train_flops=part.train_flops,
            forward_flops=part.flops.forward,
            shape=shape,
        )
        store.put_json(run.plan, plan.to_json())


def features_of(campaign: Campaign, dataset: DataSet) -> Column | None:
    """Features that rows are clustered by, or, for other methods, that the clusters are looked at with."""
    name = features_column(campaign.config.partition.encoder)
    return dataset.column(name) if dataset.has_column(name) else None


def island_columns(campaign: Campaign, dataset: DataSet) -> list[str]:
    """Name the columns that an island needs; refuses data made with other settings than the campaign's."""
    ingested, config, location = dataset.manifest.config, campaign.config, dataset.store.location
    if config.data.source is not None and ingested:
        settings = IngestConfig.parse(ingested, dataset.store.name("manifest.json"))  # perhaps older
        if settings != config.data.ingest:
            fix = "put data.ingest back, or choose another data.path"
            raise DataError(f"{location} was ingested with other settings than data.ingest has now", fix)
    if (by := config.data.captioner) is not None and not made_by(dataset, CAPTION, by.producer()):
        what = f"captions of {location} are missing, or of other settings than data.captioner"
        raise DataError(what, "run 'atoll data caption', or leave data.captioner out")
    for name, producer in wanted_columns(config).items():
        if not made_by(dataset, name, producer):
            command = "embed" if name.startswith("features-") else "encode"
            state = "of other settings" if dataset.has_column(name) else "missing"
            raise DataError(f"column {name!r} of {location} is {state}", f"run 'atoll data {command}'")
    if not config.data.weighted:
        return ["split", *training_columns(config)]
    dataset.column(WEIGHTS)  # without it all rows would count alike
    source, weighed = config.data.source, producer_of(dataset)
    if isinstance(source, dict) and weighed.get("name") in ("sources", *PLAIN):
        wanted = {name: settings.weight for name, settings in source.items()}
        if weighed.get("weights", dict.fromkeys(source, 1.0)) != wanted:
            what = f"the weights of {location} are others than those of data.source"
            raise DataError(what, "run 'atoll data ingest', which writes them anew")
    return ["split", *training_columns(config), WEIGHTS]


def write_clusters(whole: DataSet, parts: list[DataSet], partition: Partition) -> None:
    """Write the `clusters` column of a data set made of the islands' shards in order."""
    numbers = np.repeat(np.arange(len(parts), dtype=np.int16), [len(part) for part in parts])
    whole.write_values("clusters", {"name": "partition", "hash": partition.hash}, numbers)


def _say_partition(partition: Partition, budget: Budget, config: CampaignConfig) -> None:
    about, total, weight = partition.about, sum(partition.sizes), sum(partition.masses)
    say(f"partition {partition.hash[:12]}: {partition.k} clusters of {total:,} training rows")
    for number, run in enumerate(experts_of(partition.k)):
        size, own = partition.sizes[number], budget[run]
        part = f", {partition.masses[number] / weight:6.1%} of the weight" if about.masses else ""
        of = f", {about.column or 'label'} {shorten(about.values[number])}" if about.values else ""
        steps = f"{many(own.steps, 'step')} of {own.batch}"
        say(f"  cluster {number}: {size:6,} rows {size / total:6.1%}{part}, {steps}{of}")
    if about.masses and config.budget.compute != "equal":
        say("  an expert's steps follow the weights of its rows, not how many they are (data.weighted)")
    batches = [budget[run].batch for run in experts_of(partition.k)]
    for bucket, rows in about.buckets.items():
        say(f"  {bucket}: {shorten([f'{number:,.0f}' for number in rows], 16)} rows by cluster")
        if short := [str(n) for n, number in enumerate(rows) if 0 < number < batches[n]]:
            say(f"  warning: clusters whose rows of it wait until they fill a step: {shorten(short)}")
    for warning in (*about.warnings, *too_small(config, budget)):
        say(f"  warning: {warning}")
    if (inertia := about.inertia) is not None:
        cost = f", {inertia.clusters / inertia.free - 1:+.2%} for the limits" if inertia.free else ""
        say(f"  inertia {inertia.clusters:.4g}, of random clusters {inertia.random:.4g}{cost}")
    if pretrain := budget.get(Run("pretrain")):
        steps = f"{many(pretrain.steps, 'step')} of {pretrain.batch}"
        say(f"  shared pretraining: {steps} on all rows, before the experts")
    router, monolith = budget[Run("router")], budget[Run("monolith")]
    steps = f"{many(router.steps, 'step')} of {router.batch}; experts + router"
    cost = f"{flops_ratio(budget):.3f} of the monolith's {monolith.train_flops:.3g} FLOPs"
    say(f"  router: {steps}{' + pretraining' if pretrain else ''} cost {cost}")
    for run in budget:
        if run.kind.counted == "extra":
            _say_extra(run, budget)


def _say_extra(run: Run, budget: Budget) -> None:
    part, share = budget[run], budget[run].train_flops / budget[Run("monolith")].train_flops
    steps = f"{many(part.steps, 'step')} of {part.batch} after the experts; with its teachers it costs"
    say(f"  {run.name}: {steps} {share:.3f} of the monolith's FLOPs, beyond theirs")
