"""The stages of aesthetics: train a scorer, score rows and folders, compare scores with people's."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from atoll.base.console import Progress, say
from atoll.base.errors import ConfigError, DataError, nearest
from atoll.base.hashing import sha256
from atoll.base.part import Part
from atoll.base.table import Column as TableColumn
from atoll.base.table import Table, text
from atoll.base.text import many
from atoll.campaign.folder import Campaign
from atoll.campaign.report_table import SCORES, ReportTable
from atoll.curate.aesthetics.scale import HEADS, MEAN, Labels
from atoll.curate.aesthetics.scorer import Scorer, Training
from atoll.curate.concepts import numeric, read_tables
from atoll.data.columns import Column
from atoll.data.dataset import DataSet
from atoll.data.decode import open_picture, pictures_below
from atoll.data.formats import clean
from atoll.data.job import ColumnJob
from atoll.store.store import Store

F64 = NDArray[np.float64]
COLUMN = "aesthetics"
"""Scores of every row, `(S,)` float32; the producer names them."""
SHOWN = ("SRCC", "PLCC", "KRCC", "MSE", "MAE", "accuracy", "F1")


def train_stage(scorer: Scorer, labels: Labels, training: Training, out: str) -> dict[str, Any]:
    """Train a scorer and write it; what was done."""
    done = scorer.fit(labels, training)
    scorer.save(out, done)
    say(f"trained on {done['rows']:,} pictures of {done['groups']:,} groups; wrote {out}")
    _say_untrained(done)
    return done


def _say_untrained(training: Mapping[str, Any]) -> None:
    # Rows of which only the whole is labelled train the regression head, all others the expert head.
    alone = {training.get("rows"): "the dimensions (expert head)", 0: "the regression head"}
    if (head := alone.get(training.get("rows with the whole alone", -1))) is not None:
        say(f"note: no label trained {head}: disregard those scores")


def score_stage(campaign: Campaign, folder: str, device: str, part: Part | None = None) -> None:
    """Write (or find) the column of scores, or one part of its shards."""
    scorer, file = Scorer.load(folder, device)
    dataset, names = campaign.dataset(), [*scorer.columns]

    def compute(shard: int) -> dict[str, Tensor]:
        return {"values": scorer.scores(dataset.iter_images(shard))}

    producer = {"name": "scorer", "weights": file.files[0].sha256, "backbone": file.producer, "scores": names}
    producer["sensitive"] = [d.name for d in file.scale.dimensions if d.sensitive]
    job = ColumnJob(dataset, COLUMN, producer, compute)
    if part is not None:
        return job.write_part(part)
    job.run()
    _reported(campaign, dataset.column(COLUMN))


def import_stage(campaign: Campaign, path: Path, sensitive: tuple[str, ...] = ()) -> None:
    """Write the scores of a table, those of the original HumanAesExpert for example: `id` and numbers.

    `DataError` for no `id` or numbers, rows of the data set without scores, or one outside [0, 1].
    """
    dataset, table = campaign.dataset(), pa.concat_tables(read_tables(path, "id"))
    names = [name for name in numeric(table) if name != "id"]
    if not names:
        raise DataError(f"{path} has no columns of scores", "give one or more of numbers")
    row_of = {str(id_): row for row, id_ in enumerate(table["id"].to_pylist())}
    if again := len(table) - len(row_of):
        raise DataError(f"{path} scores {again:,} rows again", "give one score of each name for an id")
    if missing := [id_ for id_ in dataset.ids if id_ not in row_of]:
        what = f"{path} lacks {len(missing):,} of {len(dataset):,} rows, {missing[0]!r} first"
        raise DataError(what, "give the scores of this data set")
    order = [row_of[id_] for id_ in dataset.ids]
    values = np.stack([table[name].to_numpy().astype(np.float32)[order] for name in names], axis=1)
    # Written so that NaN is refused too, which compares false with everything.
    wrong = np.argwhere(~((values >= 0) & (values <= 1)))
    if len(wrong):
        row, number = wrong[0]
        what = f"{path}: {names[number]} of {dataset.ids[row]!r} is {values[row, number]:g}"
        raise DataError(what, "bring scores to 0 to 1")
    producer = {"name": "imported", "table": sha256(path), "scores": names, "sensitive": [*sensitive]}
    for name in sensitive:
        if name not in names:
            raise ConfigError(f"{path} has no score {name!r}", nearest(name, names))
    _reported(campaign, dataset.write_values(COLUMN, producer, values))


def _reported(campaign: Campaign, column: Column) -> None:
    values = column.read(np.arange(len(column)))
    parts = [("all", values)]
    if campaign.is_partitioned:
        partition = campaign.clustered()[1]
        parts += [(f"cluster {k}", values[partition.clusters == k]) for k in range(partition.k)]
    names = column.meta.producer["scores"]
    # The one that a filter goes by comes first: what is said of a cluster is its first column of numbers.
    shown = next((names.index(name) for name in ("score", MEAN) if name in names), 0)
    order = [shown, *(n for n in range(len(names)) if n != shown)]
    rows: list[list[Any]] = [
        [name, *(round(float(of[:, n].mean()), 4) for n in order)] for name, of in parts if len(of)
    ]
    heads = ["rows", *(names[n] for n in order)]
    about = "Means over all rows of the data set (atoll aesthetics score)."
    report = ReportTable(title="Scores of the pictures", text=about, columns=heads, rows=rows)
    report.write(campaign.store, SCORES)
    low, middle, high = np.quantile(values[:, shown].numpy(), [0.05, 0.5, 0.95]).tolist()
    say(f"{names[shown]}: median {middle:.3f}, nine tenths within {low:.3f} and {high:.3f}")
    for name, of in parts[1:]:
        say(f"  {name}: {len(of):,} rows, mean {float(of[:, shown].mean()):.3f}")


def scores_of(dataset: DataSet, name: str, sensitive: bool = False) -> NDArray[Any]:
    """One score of all rows `(rows,)`; `ConfigError` for an unknown, or an unasked sensitive one."""
    column = dataset.column(COLUMN) if dataset.has_column(COLUMN) else None
    names = column.meta.producer.get("scores", []) if column else []
    name = MEAN if name == "score" and name not in names and names else name
    if column is None or name not in names:
        fix = f"use {', '.join(['width', 'height', *names])}, or 'atoll aesthetics score' first"
        raise ConfigError(f"there is no score {name!r}", fix)
    if name in column.meta.producer.get("sensitive", []) and not sensitive:
        what = f"{name!r} describes a person: rows are not chosen by it"
        raise ConfigError(what, "say --allow-sensitive if that is what you mean")
    values: NDArray[Any] = column.read(np.arange(len(dataset)))[:, names.index(name)].numpy()
    return values


def score_folder(scorer: Scorer, folder: Path, out: Path) -> None:
    """Score the pictures below a folder into a parquet file: `image` and each score; broken ones stay out."""
    paths = pictures_below(folder)
    if not out.parent.is_dir() or (out.exists() and not out.is_file()):
        raise DataError(f"{out} cannot be written", "give a file in a folder that exists")
    progress, images = Progress("scores", len(paths), unit="pictures"), list[str]()
    unreadable: list[DataError] = []

    def readable() -> Iterator[Image.Image]:
        for number, path in enumerate(paths, 1):
            try:
                picture = open_picture(path)
            except DataError as error:
                unreadable.append(error)
            else:
                images.append(clean(str(path.relative_to(folder))))
                yield picture
            progress(number)

    values = scorer.scores(readable()).numpy()
    if not images:
        raise unreadable[0]
    columns = {name: values[:, number] for number, name in enumerate(scorer.columns)}
    pq.write_table(pa.table({"image": images, **columns}), data := pa.BufferOutputStream())
    Store.open(out.parent).put(out.name, data.getvalue().to_pybytes())
    left = f"; left out {len(unreadable):,}, the first for: {unreadable[0]}" if unreadable else ""
    say(f"{many(len(images), 'picture')}: {MEAN} {columns[MEAN].mean():.3f} on average; wrote {out}{left}")


def evaluate_stage(
    scorer: Scorer, labels: Labels, training: Mapping[str, Any], out: str | None = None
) -> dict[str, dict[str, float]]:
    """How a scorer agrees with people, by head and dimension; printed, and written for the report."""
    scores = scorer.scores(map(labels.open, range(len(labels))))
    agreements = {}
    for number, name in enumerate(scorer.columns):
        right = labels.scores[:, scorer.scale.root if number < len(HEADS) else number - len(HEADS)]
        known = ~right.isnan()
        if known.any():
            pair = (scores[known, number].double().numpy(), right[known].double().numpy())
            agreements[name] = agreement(*pair, levels=len(scorer.scale.levels))
    rows = [
        {"score": name}
        | {metric: None if math.isnan(value) else round(value, 6) for metric, value in of.items()}
        for name, of in agreements.items()
    ]
    heads = (TableColumn("score"), *(TableColumn(metric, digits=3) for metric in SHOWN))
    say("\n".join(text(Table("", "", heads, rows))))
    _say_untrained(training)
    if out is not None:
        about = f"{len(labels):,} labelled pictures (atoll aesthetics evaluate)."
        cells = [list(row.values()) for row in rows]
        left = ReportTable(title="Agreement with people", text=about, columns=list(rows[0]), rows=cells)
        left.write(Store.open(out, create=True), "agreement")
    return agreements


def agreement(scores: F64, right: F64, levels: int = 5) -> dict[str, float]:
    """Of scores in [0, 1] `(R,)` with right ones: errors, correlations, and precision by level.

    `published MSE` and `published MAE` are what HumanAesExpert's code calls so: the roots of the two. PLCC,
    SRCC and KRCC are Pearson's, Spearman's and Kendall's correlations, NaN where all scores are the same.
    Accuracy, precision, recall and F1 are of levels of equal width; the latter three are means over the
    levels that occur among either, 0 for one that is never met.
    """
    from scipy import stats  # a second that a filter, which reads scores too, does without

    errors = scores - right
    mse, mae = float((errors**2).mean()), float(np.abs(errors).mean())
    values = {"MSE": mse, "MAE": mae}
    values |= {"published MSE": math.sqrt(mse + 1e-8), "published MAE": math.sqrt(mae + 1e-8)}
    apart = len(scores) > 1 and np.ptp(scores) > 0 and np.ptp(right) > 0
    for name, of in (("PLCC", stats.pearsonr), ("SRCC", stats.spearmanr), ("KRCC", stats.kendalltau)):
        values[name] = float(of(scores, right).statistic) if apart else math.nan
    said, true = (np.clip(np.floor(of * levels), 0, levels - 1) for of in (scores, right))
    hits = {level: float(((said == level) & (true == level)).sum()) for level in {*said, *true}}
    precisions = [hit / max(1.0, float((said == level).sum())) for level, hit in hits.items()]
    recalls = [hit / max(1.0, float((true == level).sum())) for level, hit in hits.items()]
    both = zip(precisions, recalls, strict=True)
    return values | {
        "accuracy": float((said == true).mean()),
        "precision": float(np.mean(precisions)),
        "recall": float(np.mean(recalls)),
        "F1": float(np.mean([2 * p * r / (p + r) if p + r else 0.0 for p, r in both])),
    }
