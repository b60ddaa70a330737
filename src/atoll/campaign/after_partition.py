"""Rows that come and go after the partition: new ones get its clusters, others opt out of it for good."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from atoll.base.console import say
from atoll.base.errors import DataError, PartitionError
from atoll.base.safe_parse import read_text
from atoll.base.table import Table, text
from atoll.base.text import shorten
from atoll.campaign.folder import Campaign
from atoll.campaign.partition import features_of, island_columns, write_clusters
from atoll.campaign.report_table import Cell, ReportTable
from atoll.campaign.runs import Run, RunPlan, experts_of, runs_of
from atoll.data import partition as partitions
from atoll.data.cluster import Features, normalise
from atoll.data.cluster_map import cluster_map
from atoll.data.columns import Column, Rows
from atoll.data.dataset import DataSet
from atoll.data.formats import ClusterMap, PartitionFile
from atoll.data.partition import Partition
from atoll.data.settings import features_column
from atoll.data.subsets import union, write_subset
from atoll.data.weights import DUPLICATES, OPTED_OUT, opt_out
from atoll.store.lease import Held, silence
from atoll.store.log import Log
from atoll.store.store import Absent, Store

COLUMN = "clusters"
FAR, MANY = 0.99, 0.05
"""Quantile of the training rows' distances, and the share of new rows beyond it that is worth a warning."""
SHOWN = 16
"""Clusters that are printed, those of the most new rows."""


# Rows that come.


def assign_new_rows(campaign: Campaign, path: str) -> Rows:
    """Write the column `clusters` of the data set at `path`, and compare its rows with the training rows.

    Nothing of the campaign changes but the table `new-rows` of its report. Returns the clusters `(rows,)`.
    `DataError` where it lacks what the partition decides by, `PartitionError` for a value of no cluster.
    """
    own_data, partition = campaign.clustered()
    try:
        dataset = DataSet.open(Store.open(path))
    except Absent:
        raise DataError(f"there is no data set at {path}", "make it: atoll data ingest, embed") from None
    features: Column | None = None
    if partition.about.method == "kmeans":
        name = features_column(campaign.config.partition.encoder)
        if not dataset.has_column(name):
            fix = "run 'atoll data embed' with the same partition.encoder"
            raise DataError(f"{dataset.store.location} has no column {name!r}", fix)
        features = dataset.column(name)
        if features.meta.producer != own_data.column(name).meta.producer:
            what = f"column {name!r} of {dataset.store.location} is by another encoder or of another size"
            raise DataError(what, "embed it again with the campaign's partition.encoder and encoder_size")
    clusters = partition.assign(dataset, features)
    dataset.write_values(COLUMN, {"name": "partition", "hash": partition.hash}, clusters.astype(np.int16))

    # Shares of the clusters, and distances to their centroids, of training rows and of new ones.
    before = np.array(partition.sizes) / sum(partition.sizes)
    now = np.bincount(clusters, minlength=partition.k) / len(clusters)
    rows: list[list[Cell]] = [
        [f"cluster {number}", round(share * len(clusters)), round(old, 4), round(share, 4)]
        for number, (old, share) in enumerate(zip(before.tolist(), now.tolist(), strict=True))
    ]
    moved = round(float(np.abs(now - before).sum()) / 2, 4)
    rows.append(["all", len(clusters), None, None])
    heads = ["cluster", "new rows", "share of training rows", "share of new rows"]
    about = f"Rows that came later, by the campaign's clusters: {moved:.1%} of them are where others were."
    own_features, far_share = features_of(campaign, own_data), 0.0
    if own_features is not None and features is not None:
        heads += ["distance of training rows", "of new rows", "farther than 99 %"]
        train = own_data.split("train")
        old_distances = _distances(own_features, train, partition.clusters, partition.centroids)
        distances = _distances(features, np.arange(len(features)), clusters, partition.centroids)
        far = np.zeros(len(distances), bool)
        for number, cells in enumerate(rows[:-1]):
            own, new = old_distances[partition.clusters[train] == number], clusters == number
            # Each cluster has its own bound: wide ones hold rows that would be far out in narrow ones.
            # Of rows that all weigh nothing by now there is no bound.
            far[new] = distances[new] > (np.quantile(own, FAR) if len(own) else np.inf)
            cells += _means(own, distances[new], far[new])
        rows[-1] += _means(old_distances, distances, far)
        far_share = round(float(far.mean()), 4)
        about += " The last column would be 0.01 for rows like the training rows."
    report = ReportTable(title="New rows", text=about, columns=heads, rows=rows)
    key = report.write(campaign.store, "new-rows")

    say(f"column {COLUMN!r} of {dataset.store.location}: {len(dataset):,} rows by {partition.hash[:12]}")
    largest = sorted(rows[:-1], key=lambda cells: -float(cells[1] or 0))[:SHOWN]
    for line in text(Table.plain(heads, [*largest, rows[-1]], digits=3)):
        say(f"  {line}")
    say(f"all {partition.k} clusters: {campaign.store.name(key)}, and in the report (atoll report)")
    if far_share > MANY:
        rest = "of the rows lie farther out than 99 % of their cluster's training rows"
        say(f"  warning: {far_share:.1%} {rest}")
    return clusters


def _means(*parts: NDArray[np.generic]) -> list[float | None]:
    return [round(float(part.mean()), 4) if len(part) else None for part in parts]


def _distances(features: Column, rows: Rows, clusters: Rows, centroids: Features) -> NDArray[np.float32]:
    """Euclidean distances `(n,)` of some rows to the centroid of their cluster; clusters are of all rows."""
    units = ((block, normalise(values.float().numpy())) for block, values in features.blocks(rows, 8192))
    return np.concatenate([np.linalg.norm(unit - centroids[clusters[n]], axis=1) for n, unit in units])


# Rows that go.


def opt_out_stage(campaign: Campaign, path: Path, retrain: bool = False) -> list[int]:
    """Take rows out for good: they get the weight 0, and their islands' data are written again without them.

    The cut and its hash stay, so that the experts of other islands stay what they are; `revision` tells that
    rows left. Killed and called again with the same list it goes on. Returns the islands that were written.

    Args:
        path: text file with an id, or the SHA-256 of a source picture, a line.
        retrain: whether to remove what was trained on these rows, which is refused otherwise.

    Before anything is changed it is a `PartitionError` if something was trained on the rows, an island would
    be left without any to train on, or the data set's weights are others by now; `Held` if a run is trained.
    """
    store = campaign.store
    dataset, partition = campaign.clustered()
    named = _named(dataset, {line.strip() for line in read_text(path).splitlines()} - {""}, path)
    before = dataset.weights
    after, counted = before.copy(), before.copy()
    after[named] = 0
    # Rows that another campaign of this data set has taken out count in this one until they leave it, too.
    if dataset.is_written(OPTED_OUT):
        shared = named[dataset.column(OPTED_OUT).read(named).numpy() != 0]
        if dataset.is_written(DUPLICATES):
            shared = shared[dataset.column(DUPLICATES).read(shared).numpy() == shared]
        counted[shared] = 1
    # The weights are written last. Where an earlier call with this list was killed right before that, the
    # partition is already revised, and those of after are what it says.
    for weights in (before, counted, after):
        dataset.weights = weights
        if partition.weighs_as(dataset):
            break
    else:
        raise PartitionError(
            f"the weights of {dataset.store.location} are no longer those that the partition was made with",
            "name no rows that left it before, or leave the rows out of a new campaign before its partition",
        )
    leaving, dataset.weights = named[weights[named] > 0], after
    say(f"{path.name} names {len(named):,} rows, of which {len(named) - len(leaving):,} count 0 already")
    changed: list[int] = np.unique(partition.clusters[leaving]).tolist()
    if changed:
        revision = partitions.revised(partition, dataset)
        _write_islands(campaign, dataset, revision, changed, retrain)
        store.put_json(PartitionFile.PLACE, revision.about.to_json())
        counts = np.bincount(revision.clusters[leaving], minlength=revision.k)
        written = ", ".join(f"{number} ({counts[number]:,} rows)" for number in changed)
        others = ", ".join(str(number) for number in range(revision.k) if number not in changed) or "none"
        say(f"{len(leaving):,} rows have left: islands {written} are written again; unchanged: {others}")
        say(f"  partition {revision.hash[:12]} stays, revision {str(revision.about.revision)[:12]}")
        say("  the data set holds the rows with weight 0: take them from its source and from other campaigns")
    # Duplicates among them count 0 already, and have to stay out when others are looked for.
    opt_out(dataset, np.isin(np.arange(len(dataset)), named))
    return changed


def _named(dataset: DataSet, names: set[str], path: Path) -> Rows:
    """Numbers of the rows whose id or digest of the source is among the names, ascending."""
    wanted, rows, idle = pa.array(sorted(names), pa.string()), list[Rows](), names.copy()
    for shard in range(len(dataset.shards)):
        values = dataset.shard_table(shard, ["id", "sha256"]).columns
        hits = [pc.is_in(column, wanted) for column in values]
        for column, hit in zip(values, hits, strict=True):
            idle.difference_update(column.filter(hit).to_pylist())
        rows.append(np.flatnonzero(pc.or_kleene(*hits).to_numpy()) + int(dataset.bounds[shard]))
    some = shorten(sorted(idle), 5)
    if len(idle) == len(names):
        what = f"no line of {path} names a row" + (f": {some}" if some else ", since it has none")
        raise DataError(what, "give ids, or SHA-256s of source pictures, as `rows/*.parquet` has them")
    if idle:
        say(f"warning: {len(idle):,} of {len(names):,} lines name no row: {some}")
    return np.concatenate(rows)


def _write_islands(
    campaign: Campaign, dataset: DataSet, after: Partition, changed: list[int], retrain: bool
) -> None:
    store = campaign.store
    whole = [run for run in runs_of(campaign.config, planned=True) if run.expert is None]
    whole = [run for run in whole if store.exists(run.plan)]
    plans = {run: RunPlan.read(store, run.plan) for run in (*experts_of(after.k), *whole)}

    # What learned from the rows goes, only when that is asked for. Where there is shared pretraining, every
    # expert started from what was learned from them.
    seeded, keys, names = Run("pretrain") in whole, list[str](), list[str]()
    for run in plans:
        if run.expert is None or seeded or run.expert in changed:
            place, lease = store.sub(f"{run.folder}/run"), campaign.config.training(*run).lease
            if retrain and (quiet := silence(place, Log(place, "").holding())) <= lease.expiry_seconds:
                raise Held(f"{run.name} is in training: its last sign is {quiet:.0f} s old", "stop it first")
            started = ["init"] if plans[run].init in ("pretrain", "experts") else []
            own = [key for part in ("run", "expert", *started) for key in store.list(f"{run.folder}/{part}")]
            keys, names = keys + own, names + [run.name] * bool(own)
    if keys and not retrain:
        what = f"{', '.join(names)} learned from rows that leave"
        raise PartitionError(what, "add --retrain to remove what was trained, and train it again")
    if keys:
        # A log loses its end first: stopped in between, it has no gap.
        store.delete(*reversed(keys), *store.list("ensemble"))
        say(f"removed, to be trained again: {', '.join(names)}; reports are of what was there before")

    parts, names_of_columns = list[DataSet](), island_columns(campaign, dataset)
    for run, plan in plans.items():
        folder = f"{run.folder}/data"
        if run.expert is None or run.expert in changed:
            store.delete(*store.list(folder))
            if run.expert is None:
                rows = sum(after.sizes)
                write_clusters(union(store, folder, parts, names_of_columns), parts, after)
            else:
                rows = after.sizes[run.expert]
                write_subset(dataset, after.rows(run.expert, dataset), store, folder, names_of_columns)
                sheet = partitions.contact_sheet(after, dataset, run.expert)
                store.put(f"partition/sheets/{run.expert}.png", sheet)
            # Steps and all else stay: only the number of rows is another.
            store.put_json(run.plan, plan.model_copy(update={"rows": rows}).to_json())
        if run.expert is not None:
            parts.append(DataSet.open(store, folder))
    overview = cluster_map(dataset, features_of(campaign, dataset), after.clusters, after.centroids, after.k)
    store.put_json(ClusterMap.PLACE, overview.to_json())
