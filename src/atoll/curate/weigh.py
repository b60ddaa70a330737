"""Weights of rows: 1 and 0 by scores or licence, or less for frequent concepts, so that rare ones count.

The rule of the second is MetaCLIP's (Xu et al. 2024, arXiv 2309.16671): each concept of a row keeps it with
the chance `t / max(count, t)`, where `count` is the rows with the concept, and one that does is enough. There
rows are thrown away by chance; here the chance is the row's weight: all experts and the router draw by it.
"""

import operator
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError
from atoll.base.hashing import sha256
from atoll.base.safe_parse import read_text
from atoll.campaign.folder import Campaign
from atoll.campaign.report_table import ReportTable
from atoll.curate.aesthetics.stages import scores_of
from atoll.curate.audit import I64, chunks, written
from atoll.curate.concepts import IMAGE, TEXT, Vocabulary, caption_hits, hits_of
from atoll.data.dataset import WEIGHTS, DataSet
from atoll.data.weights import B1, F32, PLAIN, candidates, producer_of, write_weights

Condition = Callable[[DataSet, Sequence[I64], bool], B1]
"""Of a data set, groups of rows and whether sensitive scores are allowed: rows that are kept `(rows,)`."""
COMPARED = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
# Longer signs first: `>` would match in `>=` and leave `=` to the number.
COMPARISON = re.compile(r"([^<>]+?) ?(>=|<=|>|<) ?(q?)([0-9.eE+-]+)")
IN_LIST = re.compile(r"(\S+) (not )?in ?\((.+)\)")
OF_ROWS = ("width", "height")
MOST = 12
"""Concepts whose loss is shown."""


def parse(text: str) -> Condition:
    """A condition as it is written; `ConfigError` where it is none.

    `NAME >= VALUE` is about `score` (the scorer's vote), any other score, or `width` or `height` of the
    source picture; with `qVALUE` the value is a share of the group's rows. `NAME in (A, B)`, or `not in`, is
    about a column of texts of `rows/*.parquet`, as `licence`.
    """
    plain = " ".join(text.split())  # not by the patterns, which take ever longer for many spaces
    if listed := IN_LIST.fullmatch(plain):
        values = tuple(value.strip() for value in listed[3].split(","))
        return lambda dataset, groups, sensitive: _listed(dataset, listed[1], values) ^ bool(listed[2])
    parts = COMPARISON.fullmatch(plain)
    try:
        name, compare, quantile, number = parts.groups() if parts else ("", "", "", "")
        value = float(number)
    except ValueError:
        fix = "write for example 'score >= q0.5', 'width >= 64' or 'licence in (MIT, Apache-2.0)'"
        raise ConfigError(f"--keep {text[:100]!r} is no condition", fix) from None
    if quantile and not 0 <= value <= 1:
        raise ConfigError(f"--keep {text[:100]!r}: a quantile of {number[:20]}", "give one from 0 to 1")

    def compared(dataset: DataSet, groups: Sequence[I64], sensitive: bool) -> B1:
        if name in OF_ROWS:
            values = dataset.table([name])[name].to_numpy().astype(np.float32)
        else:
            values = scores_of(dataset, name, sensitive)
        fulfilled = np.zeros(len(values), dtype=bool)
        for rows in groups:
            bound = np.quantile(values[rows], value) if quantile and len(rows) else value
            # In float32, as scores are stored: a bound in float64 would lose rows that equal it.
            fulfilled[rows] = COMPARED[compare](values[rows], np.float32(bound))
        return fulfilled

    return compared


def _listed(dataset: DataSet, name: str, values: tuple[str, ...]) -> B1:
    texts = [field.name for field in dataset.shard_table(0).schema if pa.types.is_string(field.type)]
    if name not in texts:
        fix = "a licence comes from data.ingest.licence_column, a source from several sources"
        raise ConfigError(f"rows have no {name!r}", f"they have {', '.join(texts)}; {fix}")
    column = dataset.table([name])[name]
    present = pc.unique(column).to_pylist()
    for value in values:
        # Most likely misspelled; taken at its word, it would silently keep or drop every row.
        if value not in present:
            some = ", ".join(str(text)[:40] for text in present[:12])
            raise ConfigError(f"no row has the {name} {value!r}", f"there are {some}")
    listed: B1 = pc.is_in(column, pa.array(values)).to_numpy()
    return listed


def filter_stage(
    campaign: Campaign,
    keep: Sequence[str],
    per_cluster: bool = False,
    protect: Path | None = None,
    sensitive: bool = False,
    times: bool = False,
    dry_run: bool = False,
) -> None:
    """Choose training rows, say what each cluster and concept loses, and write weights of 1 and 0.

    `ConfigError` for a condition (see `parse`) that is none, or that keeps no row; `DataError` where scores,
    clusters or concepts are missing.
    """
    dataset, conditions = campaign.dataset(), [parse(text) for text in keep]
    train = candidates(dataset)
    if times:
        dataset.column(WEIGHTS)  # there must be some
        train = train[dataset.weights[train] > 0]  # what is out stays out
    partition = campaign.clustered()[1] if campaign.is_partitioned or per_cluster else None
    homes = [train]
    if partition:
        homes = [train[partition.clusters[train] == number] for number in range(partition.k)]
    chosen = np.zeros(len(dataset), dtype=bool)
    chosen[train] = True
    for condition in conditions:
        chosen &= condition(dataset, homes if per_cluster else [train], sensitive)

    # Rows of protected concepts, whatever they score.
    vocabulary = written(campaign, Vocabulary) if protect or campaign.store.exists(Vocabulary.PLACE) else None
    if protect is not None and vocabulary is not None:
        named = [line.strip() for line in read_text(protect).splitlines() if line.strip()]
        unknown = [name for name in named if vocabulary.number(name) is None]
        numbers = [number for name in named if (number := vocabulary.number(name)) is not None]
        if unknown or not named:
            wrong = f"{unknown[0]!r} is no concept of the vocabulary" if unknown else "it is empty"
            raise DataError(f"{protect}: {wrong}", "give concepts that 'atoll concepts index' was given")
        for part in chunks(train):
            rows, concepts = _hits(dataset, vocabulary, part)
            chosen[rows[np.isin(concepts, numbers)]] = True
    if not chosen.any():
        raise ConfigError(f"{' and '.join(keep)} keeps no row", "ask for less")

    # Rows, kept rows and their share: of all, of each cluster, of the concepts that lose most.
    kept: list[tuple[str, int, int]] = [("all", len(train), int(chosen[train].sum()))]
    if len(homes) > 1:
        kept += [(f"cluster {n}", len(rows), int(chosen[rows].sum())) for n, rows in enumerate(homes)]
    if vocabulary is not None and hits_of(dataset, TEXT, vocabulary) is not None:
        before, after = np.zeros((2, len(vocabulary)), dtype=np.int64)
        for part in chunks(train):
            rows, concepts = _hits(dataset, vocabulary, part)
            before += np.bincount(concepts, minlength=len(vocabulary))
            after += np.bincount(concepts[chosen[rows]], minlength=len(vocabulary))
        # The lower end of a 95 % interval of the loss (of a share, at its widest): a concept with two rows
        # that loses one says less than one with 200 that loses 90.
        lost = (before - after) / np.maximum(before, 1) - 1.96 * np.sqrt(0.25 / np.maximum(before, 1))
        most = [number for number in np.argsort(-lost, kind="stable")[:MOST] if before[number]]
        kept += [(vocabulary.concepts[n], int(before[n]), int(after[n])) for n in most]
    table: list[list[Any]] = [[of, size, left, f"{left / max(1, size):.1%}"] for of, size, left in kept]
    for name, size, left, share in table:
        say(f"{name}: {left:,} of {size:,} rows kept ({share})")
    by = producer_of(dataset)  # weights of a filter that multiplied are those of others, too
    if not times and (by.get("times") or by.get("name", "filter") not in ("filter", *PLAIN)):
        say(f"warning: the weights by {by['name']} are replaced: --times multiplies them instead")
    if dry_run:
        return

    weights = dataset.weights.copy() if times else np.ones(len(dataset), dtype=np.float32)
    # Held-out rows keep their weight: what measures must not change with what is trained on.
    weights[train] *= chosen[train]
    producer = {"name": "filter", "keep": [*keep], "per_cluster": per_cluster, "protect": bool(protect)}
    # The values too, since scores and concepts may be others under the same conditions.
    write_weights(dataset, {**producer, "times": times, "values": sha256(weights.tobytes())}, weights)
    rule = f"{' and '.join(keep)}{', within each cluster' * per_cluster} (atoll data filter)."
    heads = ["of", "rows", "kept", "share"]
    report = ReportTable(title="Rows that were kept", text=rule, columns=heads, rows=table)
    report.write(campaign.store, "filter")
    ids = "".join(f"{dataset.ids[row]}\n" for row in np.flatnonzero(chosen))
    campaign.store.put("reports/kept.txt", ids.encode())
    say(f"wrote reports/kept.txt and column {WEIGHTS}: a new campaign trains on the rows that were kept")


def _hits(dataset: DataSet, vocabulary: Vocabulary, rows: I64) -> tuple[I64, I64]:
    """Rows and their concepts, in caption or picture, each pair once."""
    # Not a table of rows by concepts: with the nouns of a large data set it has more bytes than memory.
    columns = caption_hits(dataset, vocabulary), hits_of(dataset, IMAGE, vocabulary)
    read = [column.read_ragged(rows, packed=True) for column in columns if column is not None]
    pairs = [np.repeat(rows, mask.sum(1)) * len(vocabulary) + values.numpy() for values, mask in read]
    return np.divmod(np.unique(np.concatenate(pairs)), len(vocabulary))


def rebalance_stage(
    campaign: Campaign,
    t: float,
    target: int | None = None,
    per_expert: bool = False,
    other: float = 1.0,
    dry_run: bool = False,
) -> None:
    """Print what the weights would keep, and write the column `weights`.

    `ConfigError` for a target that no `t` reaches; `DataError` where captions were not searched for concepts.
    """
    if not (1 <= t < np.inf and 0 <= other <= 1):  # NaN is refused too
        raise ConfigError(f"t = {t:g} and other = {other:g}", "give t from 1, and other from 0 to 1")
    vocabulary, dataset = written(campaign, Vocabulary), campaign.dataset()
    hits, train = caption_hits(dataset, vocabulary), candidates(dataset)
    partition = campaign.clustered()[1] if campaign.is_partitioned or per_expert else None
    clusters = partition.clusters if partition else np.zeros(len(dataset), dtype=np.int64)

    # Rows with each concept, of all rows or of the cluster's own.
    homes = clusters if per_expert else np.zeros_like(clusters)
    counts = np.zeros((partition.k if partition and per_expert else 1, len(vocabulary)), dtype=np.int64)
    for rows in chunks(train):
        values, mask = hits.read_ragged(rows, packed=True)
        np.add.at(counts, (np.repeat(homes[rows], mask.sum(1).numpy()), values.numpy()), 1)

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
            what = f"a target of {target:,} of {len(train):,} training rows"
            raise ConfigError(what, "give fewer, at least 1")
        t, high = 1.0, float(len(train))
        if (least := weights_at(t)[train].sum()) > target:
            fix = f"give {int(np.ceil(least)):,} or more"
            raise ConfigError(f"no t keeps as few as {target:,} rows", fix)
        # Bisected in the logarithm, since t spans as many decades as the data set has rows.
        while high / t > 1.001:
            middle = float(np.sqrt(t * high))
            t, high = (middle, high) if weights_at(middle)[train].sum() <= target else (t, middle)
    weights = weights_at(t)
    if not weights[train].any():
        raise ConfigError("no training row would have any weight", "give --other above 0, or more concepts")
    drawn, full = float(weights[train].sum()), int((weights[train] >= 1).sum())
    share = f"{drawn / len(train):.1%}; {full:,} of them every time"
    say(f"t = {t:,.4g}: an epoch has {drawn:,.0f} of {len(train):,} training rows ({share})")
    if partition is not None:
        sizes, by_cluster = (np.bincount(clusters[train], by, partition.k) for by in (None, weights[train]))
        for number, (rows, size) in enumerate(zip(by_cluster, sizes, strict=True)):
            say(f"  expert {number}: {rows:,.0f} of {size:,} rows ({rows / max(1, size):.1%})")
    if (by := producer_of(dataset).get("name", "rebalance")) not in ("rebalance", *PLAIN):
        say(f"warning: the weights by {by} are replaced: rebalance first, then filter with --times")
    if dry_run:
        return
    # Held-out rows are not drawn; a weight of 0 would take them out of what measures.
    weights[(dataset.sides != 0) & (weights == 0)] = 1
    producer = {"name": "rebalance", "t": t, "per_expert": per_expert, "other": other}
    producer |= {"vocabulary": vocabulary.hash, "values": sha256(weights.tobytes())}
    write_weights(dataset, producer, weights)
    say("wrote column weights; a new campaign with data.weighted=true draws by it")
