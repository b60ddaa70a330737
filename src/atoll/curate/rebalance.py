"""Weights that draw frequent concepts less often, so that rare ones are not drowned.

The rule is MetaCLIP's (Xu et al. 2024, arXiv 2309.16671): each concept of a row keeps it with the chance
`t / max(count, t)`, where `count` is the rows with the concept, and one that does is enough. There rows are
thrown away by chance; here the chance is the row's weight, and every expert and the router draw by it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from atoll.base.console import say
from atoll.base.errors import ConfigError
from atoll.campaign.folder import Campaign
from atoll.curate.audit import vocabulary_of
from atoll.curate.counts import CHUNK, caption_hits
from atoll.data.columns import Column
from atoll.data.weights import candidates, write_weights

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Rule:
    """How weights are made of counts.

    Attributes:
        t: rows from which on a concept counts as frequent.
        per_expert: whether counts are those of the row's own cluster.
        other: weight of rows without any concept.
    """

    t: float
    per_expert: bool = False
    other: float = 1.0

    def weights(self, hits: Column, train: I64, clusters: I64, k: int, concepts: int) -> F32:
        """Weights of all rows `(rows,)`, by the counts of so many concepts in the rows `train`."""
        homes = clusters if self.per_expert else np.zeros_like(clusters)
        counts = np.zeros((k if self.per_expert else 1, concepts), dtype=np.int64)
        for rows in chunks(train):
            values, mask = hits.read_ragged(rows)
            places = np.repeat(homes[rows], mask.sum(1).numpy())
            np.add.at(counts, (places, values[mask].numpy()), 1)
        chances = self.t / np.maximum(counts, self.t)
        weights = np.empty(len(hits), dtype=np.float32)
        for rows in chunks(np.arange(len(hits))):
            concepts_of, there = (tensor.numpy() for tensor in hits.read_ragged(rows))
            dropped = np.where(there, 1 - chances[homes[rows][:, None], concepts_of], 1.0).prod(1)
            # A row is dropped where each of its concepts drops it; a row of none has no reason to be.
            weights[rows] = np.where(there.any(1), 1 - dropped, self.other)
        return weights


def chunks(rows: I64) -> list[I64]:
    """Row numbers in parts whose hits fit into memory."""
    return [rows[first : first + CHUNK] for first in range(0, len(rows), CHUNK)]


def rebalance_stage(
    campaign: Campaign, rule: Rule, target: int | None = None, dry_run: bool = False
) -> F32 | None:
    """Print what the weights would keep, and write the column `weights`.

    Args:
        campaign: indexed; partitioned, if the rule is per expert.
        target: rows that one epoch is to have, in place of the rule's `t`.

    Raises:
        ConfigError: a target that no `t` reaches.
        DataError: captions are not searched for the campaign's concepts.
    """
    vocabulary, dataset = vocabulary_of(campaign), campaign.dataset()
    hits, train = caption_hits(dataset, vocabulary), candidates(dataset)
    partition = campaign.clustered()[1] if campaign.is_partitioned or rule.per_expert else None
    clusters = partition.clusters if partition else np.zeros(len(dataset), dtype=np.int64)
    k = partition.k if partition else 1

    def weights_at(t: float) -> F32:
        return replace(rule, t=t).weights(hits, train, clusters, k, len(vocabulary))

    t = rule.t if target is None else _t_of(target, weights_at, train)
    weights = weights_at(t)
    drawn, full = float(weights[train].sum()), int((weights[train] >= 1).sum())
    share = f"{drawn / len(train):.1%}; {full:,} of them every time"
    say(f"t = {t:,.4g}: an epoch has {drawn:,.0f} of {len(train):,} training rows ({share})")
    if partition is not None:
        by_cluster = np.bincount(clusters[train], weights[train], k)
        for number, (rows, size) in enumerate(zip(by_cluster, partition.sizes, strict=True)):
            say(f"  expert {number}: {rows:,.0f} of {size:,} rows ({rows / size:.1%})")
    if dry_run:
        return None
    producer = {"name": "rebalance", "t": t, "per_expert": rule.per_expert, "other": rule.other}
    # Held-out rows are not drawn; a weight of 0 would take them out of what measures.
    held = dataset.column("split").read(np.arange(len(dataset))).numpy() != 0
    weights = np.where(held & (weights == 0), np.float32(1), weights)
    write_weights(dataset, {**producer, "vocabulary": vocabulary.hash}, weights)
    say("wrote column weights; a new campaign with data.weighted=true draws by it")
    return weights


def _t_of(target: int, weights_at: Callable[[float], F32], train: I64) -> float:
    """The largest t whose weights sum to no more than the target."""
    if not 1 <= target <= len(train):
        raise ConfigError(f"a target of {target:,} of {len(train):,} training rows", "give fewer, at least 1")
    low, high = 1.0, float(len(train))
    if (least := weights_at(low)[train].sum()) > target:
        raise ConfigError(f"no t keeps as few as {target:,} rows", f"give {int(np.ceil(least)):,} or more")
    # Bisected in the logarithm, since t spans as many decades as the data set has rows.
    while high / low > 1.001:
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if weights_at(middle)[train].sum() <= target else (low, middle)
    return low
