"""Weights that draw frequent concepts less often, so that rare ones are not drowned.

The rule is MetaCLIP's (Xu et al. 2024, arXiv 2309.16671): each concept of a row keeps it with the chance
`t / max(count, t)`, where `count` is the rows with the concept, and one that does is enough. There rows are
thrown away by chance; here the chance is the row's weight, and every expert and the router draw by it.
"""

import numpy as np
from numpy.typing import NDArray

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.campaign.folder import Campaign
from atoll.curate.audit import vocabulary_of
from atoll.curate.counts import caption_hits, chunks
from atoll.data.weights import candidates, write_weights

F32 = NDArray[np.float32]


def rebalance_stage(
    campaign: Campaign,
    t: float,
    target: int | None = None,
    per_expert: bool = False,
    other: float = 1.0,
    dry_run: bool = False,
) -> F32 | None:
    """Print what the weights would keep, and write the column `weights`.

    Args:
        campaign: indexed; partitioned, if counts are per expert.
        t: rows from which on a concept counts as frequent.
        target: rows that one epoch is to have, in place of `t`.
        per_expert: whether counts are those of the row's own cluster.
        other: weight of rows without any concept.

    Raises:
        ConfigError: a target that no `t` reaches.
        DataError: captions are not searched for the campaign's concepts.
    """
    vocabulary, dataset = vocabulary_of(campaign), campaign.dataset()
    hits, train = caption_hits(dataset, vocabulary), candidates(dataset)
    partition = campaign.clustered()[1] if campaign.is_partitioned or per_expert else None
    clusters = partition.clusters if partition else np.zeros(len(dataset), dtype=np.int64)

    # Rows with each concept, of all rows or of the cluster's own.
    homes = clusters if per_expert else np.zeros_like(clusters)
    counts = np.zeros((partition.k if partition and per_expert else 1, len(vocabulary)), dtype=np.int64)
    for rows in chunks(train):
        values, mask = hits.read_ragged(rows)
        np.add.at(counts, (np.repeat(homes[rows], mask.sum(1).numpy()), values[mask].numpy()), 1)

    def weights_at(t: float) -> F32:
        chances, weights = t / np.maximum(counts, t), np.empty(len(hits), dtype=np.float32)
        for rows in chunks(np.arange(len(hits))):
            concepts, there = (tensor.numpy() for tensor in hits.read_ragged(rows))
            dropped = np.where(there, 1 - chances[homes[rows][:, None], concepts], 1.0).prod(1)
            # A row is dropped where each of its concepts drops it; a row of none has no reason to be.
            weights[rows] = np.where(there.any(1), 1 - dropped, other)
        return weights

    if target is not None:
        # The largest t whose weights sum to no more than the target.
        if not 1 <= target <= len(train):
            raise ConfigError(
                f"a target of {target:,} of {len(train):,} training rows", "give fewer, at least 1"
            )
        t, high = 1.0, float(len(train))
        if (least := weights_at(t)[train].sum()) > target:
            fix = f"give {int(np.ceil(least)):,} or more"
            raise ConfigError(f"no t keeps as few as {target:,} rows", fix)
        # Bisected in the logarithm, since t spans as many decades as the data set has rows.
        while high / t > 1.001:
            middle = float(np.sqrt(t * high))
            t, high = (middle, high) if weights_at(middle)[train].sum() <= target else (t, middle)
    weights = weights_at(t)
    drawn, full = float(weights[train].sum()), int((weights[train] >= 1).sum())
    share = f"{drawn / len(train):.1%}; {full:,} of them every time"
    say(f"t = {t:,.4g}: an epoch has {drawn:,.0f} of {len(train):,} training rows ({share})")
    if partition is not None:
        by_cluster = np.bincount(clusters[train], weights[train], partition.k)
        for number, (rows, size) in enumerate(zip(by_cluster, partition.sizes, strict=True)):
            say(f"  expert {number}: {rows:,.0f} of {size:,} rows ({rows / size:.1%})")
    if dry_run:
        return None
    # Held-out rows are not drawn; a weight of 0 would take them out of what measures.
    held = dataset.column("split").read(np.arange(len(dataset))).numpy() != 0
    weights = np.where(held & (weights == 0), np.float32(1), weights)
    producer = {"name": "rebalance", "t": t, "per_expert": per_expert, "other": other}
    write_weights(dataset, {**producer, "vocabulary": vocabulary.hash}, weights)
    say("wrote column weights; a new campaign with data.weighted=true draws by it")
    return weights
