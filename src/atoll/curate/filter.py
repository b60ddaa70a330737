"""Rows that are drawn and rows that are not, chosen by scores: weights of 1 and 0, and what that costs."""

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from atoll.base.console import say
from atoll.base.errors import ConfigError, DataError
from atoll.base.safe_parse import read_lines
from atoll.campaign.folder import Campaign
from atoll.campaign.report_table import ReportTable
from atoll.curate.aesthetics.stages import COLUMN as SCORES
from atoll.curate.aesthetics.stages import MEAN, scores_of
from atoll.curate.audit import vocabulary_of
from atoll.curate.counts import caption_hits, hits_of
from atoll.curate.image_hits import COLUMN as IMAGE
from atoll.curate.rebalance import chunks
from atoll.curate.text_hits import COLUMN as TEXT
from atoll.curate.vocabulary import Vocabulary
from atoll.data.dataset import WEIGHTS, DataSet
from atoll.data.weights import candidates, producer_of, write_weights

B1 = NDArray[np.bool_]
F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
COMPARED = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
CONDITION = re.compile(r"\s*(.+?)\s*(>=|<=|>|<)\s*(q?)([0-9.eE+-]+)\s*")
IN_LIST = re.compile(r"\s*(\S+)\s+(not\s+)?in\s*\((.+)\)\s*")
OF_ROWS = ("width", "height")
MOST = 12
"""Concepts whose loss is shown."""


@dataclass(frozen=True)
class Condition:
    """`NAME >= VALUE`: rows that fulfil it are kept.

    Attributes:
        name: `score` (the scorer's vote), any other score, or `width` or `height` of the source picture.
        quantile: whether the value is a share of the training rows, of each cluster's own if so asked.
    """

    name: str
    compare: str
    value: float
    quantile: bool

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """A condition as it is written; `ConfigError` where it is none."""
        parts = CONDITION.fullmatch(text)
        try:
            name, compare, quantile, value = parts.groups() if parts else ("", "", "", "")
            condition = cls(name, compare, float(value), bool(quantile))
        except ValueError:
            fix = "write for example 'score >= q0.5', 'width >= 64' or 'licence in (MIT, Apache-2.0)'"
            raise ConfigError(f"--keep {text!r} is no condition", fix) from None
        if condition.quantile and not 0 <= condition.value <= 1:
            raise ConfigError(f"--keep {text!r}: a quantile of {value}", "give one from 0 to 1")
        return condition

    def holds(self, values: F32, groups: Sequence[I64]) -> B1:
        """Of all rows `(rows,)`; quantiles are those of each group's own rows, which alone are compared."""
        fulfilled = np.zeros(len(values), dtype=bool)
        for rows in groups:
            bound = np.quantile(values[rows], self.value) if self.quantile and len(rows) else self.value
            # In float32, as scores are stored: a bound in float64 would lose rows that equal it.
            fulfilled[rows] = COMPARED[self.compare](values[rows], np.float32(bound))
        return fulfilled


@dataclass(frozen=True)
class InList:
    """`NAME in (A, B)`, or `not in`: rows are kept by a column of texts of `rows/*.parquet`, as `licence`."""

    name: str
    values: tuple[str, ...]
    among: bool

    @classmethod
    def parse(cls, text: str) -> "InList | None":
        """A condition as it is written; None where it is of another kind."""
        parts = IN_LIST.fullmatch(text)
        if parts is None:
            return None
        values = tuple(value.strip() for value in parts[3].split(","))
        return cls(parts[1], values, among=parts[2] is None)

    def holds(self, dataset: DataSet) -> B1:
        """Of all rows `(rows,)`.

        Raises:
            ConfigError: there is no such column of texts, or a text of none of its rows.
        """
        schema = dataset.shard_table(0).schema
        texts = [field.name for field in schema if pa.types.is_string(field.type)]
        if self.name not in texts:
            raise ConfigError(f"rows have no {self.name!r}", f"they have {', '.join(texts)}")
        values = dataset.table([self.name])[self.name]
        present = pc.unique(values).to_pylist()
        for value in self.values:
            # Most likely misspelled; taken at its word, it would silently keep or drop every row.
            if value not in present:
                some = ", ".join(str(text)[:40] for text in present[:12])
                raise ConfigError(f"no row has the {self.name} {value!r}", f"there are {some}")
        listed: B1 = pc.is_in(values, pa.array(self.values)).to_numpy()
        return listed if self.among else ~listed


def filter_stage(
    campaign: Campaign,
    keep: Sequence[str],
    per_cluster: bool = False,
    protect: Path | None = None,
    sensitive: bool = False,
    times: bool = False,
    dry_run: bool = False,
) -> B1:
    """Choose training rows, say what each cluster and concept loses, and write weights of 1 and 0.

    Args:
        campaign: with scores; partitioned, if quantiles are taken per cluster.
        keep: conditions, all of which a row must fulfil.
        protect: a text file of concepts whose rows are kept whatever they score.
        sensitive: allow scores that describe a person.
        times: multiply the weights that are there, in place of writing new ones.

    Raises:
        ConfigError: a condition that is none, or that keeps no row.
        DataError: scores, clusters or concepts are missing.
    """
    dataset, conditions = campaign.dataset(), [InList.parse(text) or Condition.parse(text) for text in keep]
    train = candidates(dataset)
    partition = campaign.clustered()[1] if campaign.is_partitioned or per_cluster else None
    k = partition.k if partition else 1
    clusters = partition.clusters if partition else np.zeros(len(dataset), dtype=np.int64)
    homes = [train[clusters[train] == number] for number in range(k)]
    chosen = np.zeros(len(dataset), dtype=bool)
    chosen[train] = True
    for condition in conditions:
        if isinstance(condition, InList):
            chosen &= condition.holds(dataset)
            continue
        if condition.name in OF_ROWS:
            values: F32 = dataset.table([condition.name])[condition.name].to_numpy().astype(np.float32)
        elif not dataset.has_column(SCORES):
            raise DataError(f"{dataset.store.location} has no scores", "run 'atoll aesthetics score' first")
        else:
            values = scores_of(dataset, MEAN if condition.name == "score" else condition.name, sensitive)
        chosen &= condition.holds(values, homes if per_cluster else [train])
    vocabulary = vocabulary_of(campaign) if protect or campaign.store.exists(Vocabulary.PLACE) else None
    if protect is not None and vocabulary is not None:
        named = [line.strip() for line in read_lines(protect) if line.strip()]
        numbers = [number for name in named if (number := vocabulary.number(name)) is not None]
        if not named or len(numbers) < len(named):
            unknown = [name for name in named if vocabulary.number(name) is None]
            wrong = f"{unknown[0]!r} is no concept of the vocabulary" if unknown else "it is empty"
            raise DataError(f"{protect}: {wrong}", "give concepts that 'atoll concepts index' was given")
        for rows in chunks(train):
            chosen[rows] |= _hits(dataset, vocabulary, rows)[:, numbers].any(1)
    if not chosen.any():
        raise ConfigError(f"{' and '.join(keep)} keeps no row", "ask for less")
    table = _table(dataset, vocabulary, train, homes, chosen)
    for name, size, kept, share in table:
        say(f"{name}: {kept:,} of {size:,} rows kept ({share:.1%})")
    if not dry_run:
        if times:
            dataset.column(WEIGHTS)  # there must be some
        weights = dataset.weights if times else np.ones(len(dataset), dtype=np.float32)
        before = producer_of(dataset).get("name", "filter")
        if before not in ("filter", "dedupe") and not times:
            say(f"warning: weights by {before} are replaced; write them again, and add --times to keep them")
        # Held-out rows keep their weight: what measures must not change with what is trained on.
        heldout = np.ones(len(dataset), dtype=bool)
        heldout[train] = False
        producer = {"name": "filter", "keep": [*keep], "per_cluster": per_cluster}
        producer |= {"protect": bool(protect), "times": times}
        write_weights(dataset, producer, weights * (chosen | heldout))
        rule = f"{' and '.join(keep)}{', within each cluster' * per_cluster} (atoll data filter)."
        heads = ["of", "rows", "kept", "share"]
        ReportTable(title="Rows that were kept", text=rule, columns=heads, rows=table).write(
            campaign.store, "filter"
        )
        ids = "".join(f"{dataset.ids[row]}\n" for row in np.flatnonzero(chosen))
        campaign.store.put("reports/kept.txt", ids.encode())
        say(f"wrote reports/kept.txt and column {WEIGHTS}: a new campaign trains on the rows that were kept")
    return chosen


def _hits(dataset: DataSet, vocabulary: Vocabulary, rows: I64) -> B1:
    """Whether rows have concepts, in caption or picture `(R, C)`."""
    found = np.zeros((len(rows), len(vocabulary)), dtype=bool)
    for column in (caption_hits(dataset, vocabulary), hits_of(dataset, IMAGE, vocabulary)):
        if column is not None:
            values, mask = column.read_ragged(rows)
            found[np.repeat(np.arange(len(rows)), mask.sum(1).numpy()), values[mask].numpy()] = True
    return found


def _table(
    dataset: DataSet, vocabulary: Vocabulary | None, train: I64, homes: list[I64], chosen: B1
) -> list[list[Any]]:
    """Rows, kept rows and their share: of all, of each cluster, of the concepts that lose most."""
    table: list[list[Any]] = [["all", len(train), int(chosen[train].sum())]]
    if len(homes) > 1:
        table += [[f"cluster {n}", len(rows), int(chosen[rows].sum())] for n, rows in enumerate(homes)]
    if vocabulary is not None and hits_of(dataset, TEXT, vocabulary) is not None:
        before, after = np.zeros((2, len(vocabulary)), dtype=np.int64)
        for rows in chunks(train):
            hits = _hits(dataset, vocabulary, rows)
            before += hits.sum(0)
            after += hits[chosen[rows]].sum(0)
        # The lower end of a 95 % interval of the loss (of a share, at its widest): a concept with two rows
        # that loses one says less than one with 200 that loses 90.
        lost = (before - after) / np.maximum(before, 1) - 1.96 * np.sqrt(0.25 / np.maximum(before, 1))
        for number in np.argsort(-lost, kind="stable")[:MOST]:
            if before[number]:
                table.append([vocabulary.concepts[number], int(before[number]), int(after[number])])
    return [[name, rows, kept, round(kept / max(1, rows), 4)] for name, rows, kept in table]
