"""Rows that must leave a campaign after its partition: their islands are written again, and no others."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from atoll.base.console import say
from atoll.base.errors import DataError, PartitionError
from atoll.base.hashing import digest
from atoll.base.plain import read_lines
from atoll.base.text import few
from atoll.campaign.folder import Campaign
from atoll.campaign.partition import features_of, island_columns, write_clusters
from atoll.campaign.runs import Run, RunPlan, experts_of, runs_of
from atoll.data import partition as partitions
from atoll.data.cluster_map import cluster_map
from atoll.data.dataset import DataSet
from atoll.data.formats import ClusterMap, PartitionFile
from atoll.data.partition import Partition
from atoll.data.subsets import union, write_subset
from atoll.data.weights import OPTED_OUT, producer_of, write_weights

I64 = NDArray[np.int64]


def opt_out_stage(campaign: Campaign, path: Path, retrain: bool = False) -> list[int]:
    """Take rows out for good: they get the weight 0, and their islands' data are written again without them.

    The cut and its hash stay, so that the experts of other islands stay what they are; `revision` tells that
    rows left. Killed and called again with the same list it goes on.

    Args:
        campaign: partitioned.
        path: text file with an id, or the SHA-256 of a source picture, a line.
        retrain: whether to remove what was trained on these rows, which is refused otherwise.

    Returns:
        Numbers of the islands that were written again.

    Raises:
        DataError: the list cannot be read, or names no row.
        PartitionError: something was trained on the rows, an island would be left without any to train on, or
            the data set's weights are others by now. Nothing is changed then.
    """
    store = campaign.store
    dataset, partition = campaign.clustered()
    named = _named(dataset, {line.strip() for line in read_lines(path)} - {""}, path)
    before, by = dataset.weights, producer_of(dataset) or {"name": "opt-out"}
    leaving = named[before[named] > 0]
    known, after = partition.weighs_as(dataset), before.copy()
    after[named] = 0
    dataset.weights = after
    # The weights are written last. Where an earlier call with this list was killed right before that, the
    # partition is already revised, and these weights are what it says.
    if not (known or partition.weighs_as(dataset)):
        what = f"the weights of {dataset.store.location} are no longer those that the partition was made with"
        raise PartitionError(
            what, "start a new campaign to draw by these, and leave the rows out before that"
        )
    say(f"{path.name} names {len(named):,} rows, of which {len(named) - len(leaving):,} count 0 already")
    changed: list[int] = np.unique(partition.clusters[leaving]).tolist()
    if known and changed:
        revision = partitions.revised(partition, dataset)
        _write_islands(campaign, dataset, revision, changed, retrain)
        store.put_json(PartitionFile.PLACE, revision.about.to_json())
        _tell(revision, leaving, changed)
    # Duplicates among them count 0 already, and have to stay out when others are looked for.
    gone = np.isin(np.arange(len(dataset)), named)
    if dataset.has_column(OPTED_OUT):
        gone |= dataset.column(OPTED_OUT).read(np.arange(len(dataset))).numpy() != 0
    dataset.write_values(OPTED_OUT, {"name": OPTED_OUT, "rows": digest(np.flatnonzero(gone).tolist())}, gone)
    write_weights(dataset, by, before)
    return changed


def _write_islands(
    campaign: Campaign, dataset: DataSet, after: Partition, changed: list[int], retrain: bool
) -> None:
    store = campaign.store
    whole = [run for run in runs_of(campaign.config, planned=True) if run.expert is None]
    whole = [run for run in whole if store.exists(run.plan)]
    seeded = Run("pretrain") in whole  # every expert started from what was learned from these rows
    learners = [*(run for run in experts_of(after.k) if seeded or run.expert in changed), *whole]
    _forget(campaign, learners, retrain)

    columns, parts = island_columns(campaign, dataset), list[DataSet]()
    for number, run in enumerate(experts_of(after.k)):
        folder = f"{run.folder}/data"
        if number in changed:
            store.delete(*store.list(folder))
            write_subset(dataset, after.rows(number, dataset), store, folder, columns)
            _count(campaign, run, after.sizes[number])
            store.put(f"partition/sheets/{number}.png", partitions.contact_sheet(after, dataset, number))
        parts.append(DataSet.open(store, folder))
    for run in whole:
        store.delete(*store.list(f"{run.folder}/data"))
        write_clusters(union(store, f"{run.folder}/data", parts, columns), parts, after)
        _count(campaign, run, sum(after.sizes))
    features = features_of(campaign, dataset)
    found = cluster_map(dataset, features, after.clusters, after.centroids, after.k)
    store.put_json(ClusterMap.PLACE, found.to_json())


def _named(dataset: DataSet, lines: set[str], path: Path) -> I64:
    """Numbers of the rows whose id or digest of the source is among the lines, ascending.

    Raises:
        DataError: no line names a row.
    """
    wanted, found, idle = pa.array(sorted(lines), pa.string()), list[I64](), lines.copy()
    for shard in range(len(dataset.shards)):
        columns = dataset.shard_table(shard, ["id", "sha256"]).columns
        hits = [pc.is_in(column, wanted) for column in columns]
        for column, hit in zip(columns, hits, strict=True):
            idle.difference_update(column.filter(hit).to_pylist())
        found.append(np.flatnonzero(pc.or_kleene(*hits).to_numpy()) + int(dataset.bounds[shard]))
    some = few(sorted(idle), 5)
    if len(idle) == len(lines):
        what = f"no line of {path} names a row" + (f": {some}" if some else ", since it has none")
        raise DataError(what, "give ids, or SHA-256s of source pictures, as `rows/*.parquet` has them")
    if idle:
        say(f"warning: {len(idle):,} of {len(lines):,} lines name no row: {some}")
    return np.concatenate(found)


def _forget(campaign: Campaign, learners: Sequence[Run], retrain: bool) -> None:
    """Remove what was trained on rows that leave; refused unless it is asked for."""
    store, keys = campaign.store, _learned(campaign, learners)
    if not keys:
        return
    names = ", ".join(run.name for run in learners if any(key.startswith(f"{run.folder}/") for key in keys))
    if not retrain:
        what = f"{names} learned from rows that leave"
        raise PartitionError(what, "add --retrain to remove what was trained, and train it again")
    store.delete(*keys)
    say(f"removed, to be trained again: {names}; reports are of what was there before")


def _learned(campaign: Campaign, learners: Sequence[Run]) -> list[str]:
    """Objects that hold what these runs learned, and the ensemble if any of them is in it."""
    store, keys = campaign.store, list[str]()
    for run in learners:
        plan = RunPlan.read(store, run.plan)
        taken = ["init"] if plan.init in ("pretrain", "experts") else []
        keys += [key for part in ("run", "expert", *taken) for key in store.list(f"{run.folder}/{part}")]
    return keys + store.list("ensemble") if keys else []


def _count(campaign: Campaign, run: Run, rows: int) -> None:
    """Write the number of training rows into a run's plan; steps and all else stay."""
    plan = RunPlan.read(campaign.store, run.plan).model_copy(update={"rows": rows})
    campaign.store.put_json(run.plan, plan.to_json())


def _tell(after: Partition, leaving: I64, changed: list[int]) -> None:
    counts = np.bincount(after.clusters[leaving], minlength=after.k)
    written = ", ".join(f"{number} ({counts[number]:,} rows)" for number in changed)
    kept = ", ".join(str(number) for number in range(after.k) if number not in changed) or "none"
    say(f"{len(leaving):,} rows have left: islands {written} are written again; unchanged: {kept}")
    say(f"  partition {after.hash[:12]} stays, revision {str(after.about.revision)[:12]}")
    say("  the data set still holds the rows, with weight 0: take them from its source, too")
