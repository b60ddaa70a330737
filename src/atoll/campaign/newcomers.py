"""New rows under a partition that stays as it is: their clusters, and how unlike training rows they are."""

import numpy as np
from numpy.typing import NDArray

from atoll.base.console import say
from atoll.base.errors import DataError
from atoll.base.text import columns, significant
from atoll.campaign.folder import Campaign
from atoll.campaign.partition import features_of
from atoll.campaign.report_table import ReportTable
from atoll.data.cluster import normalise
from atoll.data.columns import Column
from atoll.data.dataset import DataSet
from atoll.data.partition import Partition
from atoll.data.settings import features_column
from atoll.store.store import Absent, Store

COLUMN = "clusters"
FAR, MANY = 0.99, 0.05
"""Quantile of the training rows' distances, and the share of new rows beyond it from which it is told."""
SHOWN = 16
"""Clusters that are told, those of the most new rows."""
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]


def assign_stage(campaign: Campaign, path: str) -> I64:
    """Write the column `clusters` of another data set, and tell how its rows differ from the training rows.

    Nothing of the campaign changes but the table `new-rows` of its report.

    Args:
        campaign: partitioned.
        path: folder or URL of a data set, for `kmeans` with features of the campaign's encoder.

    Returns:
        Cluster of every row `(rows,)`.

    Raises:
        DataError: there is no data set, or it lacks what the partition decides by.
        PartitionError: a row has a value that no cluster has.
    """
    known, partition = campaign.clustered()
    try:
        dataset = DataSet.open(Store.open(path))
    except Absent:
        raise DataError(f"there is no data set at {path}", "make it: atoll data ingest, embed") from None
    features = _like_features(campaign, dataset) if partition.about.method == "kmeans" else None
    clusters = partition.assign(dataset, features)
    dataset.write_values(COLUMN, {"name": "partition", "hash": partition.hash}, clusters.astype(np.int16))
    finding = _drift(partition, features_of(campaign, known), known, features, clusters)
    place = finding.write(campaign.store, "new-rows")
    say(f"column {COLUMN!r} of {dataset.store.location}: {len(dataset):,} rows by {partition.hash[:12]}")
    largest = sorted(finding.rows[:-1], key=lambda cells: -float(cells[1] or 0))[:SHOWN]
    for line in columns([finding.columns, *[list(map(_cell, one)) for one in [*largest, finding.rows[-1]]]]):
        say(f"  {line}")
    say(f"all {partition.k} clusters: {campaign.store.name(place)}, and in the report (atoll report)")
    far = finding.rows[-1][-1] if features is not None else None
    if isinstance(far, float) and far > MANY:
        say(f"  warning: {far:.1%} of the rows lie farther out than 99 % of their cluster's training rows")
    return clusters


def _like_features(campaign: Campaign, dataset: DataSet) -> Column:
    """Features by the encoder that the partition was cut with."""
    own, name = campaign.dataset(), features_column(campaign.config.partition.encoder)
    if not dataset.has_column(name):
        fix = "run 'atoll data embed' with the same partition.encoder"
        raise DataError(f"{dataset.store.location} has no column {name!r}", fix)
    features = dataset.column(name)
    if features.meta.producer != own.column(name).meta.producer:
        what = f"column {name!r} of {dataset.store.location} is by another encoder or of another size"
        raise DataError(what, "embed it again with the campaign's partition.encoder and encoder_size")
    return features


def _drift(
    partition: Partition, known: Column | None, dataset: DataSet, new: Column | None, clusters: I64
) -> ReportTable:
    """Shares of the clusters and distances to their centroids, of training rows and of new ones."""
    before = np.array(partition.sizes) / sum(partition.sizes)
    now = np.bincount(clusters, minlength=partition.k) / len(clusters)
    names: list[str] = [f"cluster {number}" for number in range(partition.k)]
    rows: list[list[str | int | float | None]] = [
        [name, round(share * len(clusters)), round(old, 4), round(share, 4)]
        for name, old, share in zip(names, before.tolist(), now.tolist(), strict=True)
    ]
    moved = round(float(np.abs(now - before).sum()) / 2, 4)
    rows.append(["all", len(clusters), None, None])
    heads = ["cluster", "new rows", "share of training rows", "share of new rows"]
    text = (
        f"Rows that came later, by the clusters of the campaign: {moved:.1%} of them are where others were."
    )
    if known is not None and new is not None:
        heads += ["distance of training rows", "of new rows", "farther than 99 %"]
        train = dataset.split("train")
        old_d, new_d = _distances(known, train, partition), _distances(new, np.arange(len(new)), partition)
        old_c = partition.clusters[train]
        far = np.zeros(len(new_d), bool)
        for number, cells in enumerate(rows[:-1]):
            own, came = old_d[old_c == number], new_d[clusters == number]
            far[clusters == number] = came > np.quantile(own, FAR)
            cells += _told(own, came, far[clusters == number])
        rows[-1] += _told(old_d, new_d, far)
        text += " The last column would be 0.01 for rows like the training rows."
    return ReportTable(title="New rows", text=text, columns=heads, rows=rows)


def _cell(value: str | int | float | None) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else significant(value)


def _told(own: F32, came: F32, far: NDArray[np.bool_]) -> list[float | None]:
    return [round(float(part.mean()), 4) if len(part) else None for part in (own, came, far)]


def _distances(features: Column, rows: I64, partition: Partition) -> F32:
    """Euclidean distances of rows to the centroid of the cluster that they are given to `(n,)`."""
    parts = []
    for _, values in features.blocks(rows, 8192):
        points = normalise(values.float().numpy())
        nearest = partition.centroids[partition.nearest(points)]
        parts.append(np.linalg.norm(points - nearest, axis=1))
    return np.concatenate(parts)
