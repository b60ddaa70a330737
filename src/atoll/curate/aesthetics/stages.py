"""The stages of aesthetics: train a scorer, score rows and folders, compare scores with people's."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from atoll.base.console import Progress, say
from atoll.base.errors import ConfigError, DataError
from atoll.base.hashing import sha256
from atoll.campaign.folder import Campaign
from atoll.campaign.report_table import SCORES, ReportTable
from atoll.curate.aesthetics.labels import Labels
from atoll.curate.aesthetics.metrics import agreement
from atoll.curate.aesthetics.scorer import BATCH, HEADS, Scorer, Training
from atoll.curate.image_hits import numeric, read_table
from atoll.data.columns import Column
from atoll.data.dataset import DataSet
from atoll.data.decode import open_picture
from atoll.data.folder import SUFFIXES
from atoll.store.store import Store

COLUMN = "aesthetics"
"""Scores of every row, `(S,)` float32; the producer names them."""
MEAN = HEADS[-1]


def train_stage(scorer: Scorer, labels: Labels, training: Training, out: str) -> dict[str, Any]:
    """Train a scorer and write it; what was done."""
    done = scorer.fit(labels, training)
    scorer.save(out, done)
    say(f"trained on {done['rows']:,} pictures of {done['groups']:,} groups; wrote {out}")
    return done


def score_stage(campaign: Campaign, folder: str, device: str) -> Column:
    """Write (or find) the column of scores."""
    scorer, file = Scorer.load(folder, device)
    dataset = campaign.dataset()
    names = [*scorer.columns]
    producer = {"name": "scorer", "weights": file.hash, "backbone": file.producer, "scores": names}

    def compute(shard: int) -> dict[str, Tensor]:
        pictures = list(dataset.iter_images(shard))
        parts = [scorer.scores(pictures[i : i + BATCH]) for i in range(0, len(pictures), BATCH)]
        return {"values": torch.cat(parts) if parts else torch.empty(0, len(names))}

    producer["sensitive"] = [*file.scale.sensitive]
    progress = Progress("scores", len(dataset.shards), unit="shards")
    return _reported(campaign, dataset.write_column(COLUMN, producer, compute, progress=progress))


def import_stage(campaign: Campaign, path: Path, sensitive: tuple[str, ...] = ()) -> Column:
    """Write the scores of a table, those of the original HumanAesExpert for example: `id` and numbers.

    Raises:
        DataError: no `id` or numbers, rows of the data set without scores, or one outside [0, 1].
    """
    dataset, table = campaign.dataset(), read_table(path)
    names = [name for name in numeric(table) if name != "id"]
    if "id" not in table.column_names or not names:
        raise DataError(f"{path} needs a column 'id' and columns of scores", "name them so")
    row_of = {str(id_): row for row, id_ in enumerate(table["id"].to_pylist())}
    missing = [id_ for id_ in dataset.ids if id_ not in row_of]
    if missing:
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
    producer = {"name": "imported", "table": sha256(path.read_bytes()), "scores": names}
    producer["sensitive"] = [n for n in sensitive if n in names]
    return _reported(campaign, dataset.write_values(COLUMN, producer, values))


def _reported(campaign: Campaign, column: Column) -> Column:
    values = column.read(np.arange(len(column)))
    parts = [("all", values)]
    if campaign.is_partitioned:
        partition = campaign.clustered()[1]
        parts += [(f"cluster {k}", values[partition.clusters == k]) for k in range(partition.k)]
    names = column.meta.producer["scores"]
    shown = names.index(MEAN) if MEAN in names else 0
    order = [shown, *(n for n in range(len(names)) if n != shown)]
    rows: list[list[str | int | float | None]] = [
        [name, *[round(float(of[:, n].mean()), 4) for n in order]] for name, of in parts if len(of)
    ]
    title, columns = "Scores of the pictures", ["rows", *(names[n] for n in order)]
    text = "Means over all rows of the data set (atoll aesthetics score)."
    ReportTable(title=title, text=text, columns=columns, rows=rows).write(campaign.store, SCORES)
    low, middle, high = values[:, shown].quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    say(f"{names[shown]}: median {middle:.3f}, nine tenths within {low:.3f} and {high:.3f}")
    for name, of in parts[1:]:
        say(f"  {name}: {len(of):,} rows, mean {float(of[:, shown].mean()):.3f}")
    return column


def scores_of(dataset: DataSet, name: str, sensitive: bool = False) -> np.ndarray[Any, Any]:
    """One score of all rows `(rows,)` by its name.

    Raises:
        ConfigError: there is no such score, or it is sensitive and that was not asked for.
        DataError: the rows have no scores.
    """
    column = dataset.column(COLUMN)
    names = column.meta.producer.get("scores", [])
    if name not in names:
        raise ConfigError(f"there is no score {name!r}", f"use one of {', '.join(names)}")
    if name in column.meta.producer.get("sensitive", []) and not sensitive:
        what = f"{name!r} describes a person: rows are not chosen by it"
        raise ConfigError(what, "say --allow-sensitive if that is what you mean")
    values: np.ndarray[Any, Any] = column.read(np.arange(len(dataset)))[:, names.index(name)].numpy()
    return values


def score_folder(scorer: Scorer, folder: Path, out: Path) -> None:
    """Write the scores of all pictures below a folder as parquet: `image` and a column for each score."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
    if not paths:
        raise DataError(f"{folder} holds no images", f"known are {', '.join(sorted(SUFFIXES))}")
    if not out.parent.is_dir() or out.is_dir():
        raise DataError(f"{out} cannot be written", "give a file in a folder that exists")
    progress = Progress("scores", len(paths), unit="pictures")
    parts = []
    for first in range(0, len(paths), BATCH):
        parts.append(scorer.scores([open_picture(path) for path in paths[first : first + BATCH]]))
        progress(min(first + BATCH, len(paths)))
    values = torch.cat(parts).numpy()
    names = {name: values[:, number] for number, name in enumerate(scorer.columns)}
    pq.write_table(pa.table({"image": [str(path.relative_to(folder)) for path in paths], **names}), out)
    say(f"{len(paths):,} pictures: {MEAN} {values[:, HEADS.index(MEAN)].mean():.3f} on average; wrote {out}")


def evaluate_stage(scorer: Scorer, labels: Labels, out: str | None = None) -> dict[str, dict[str, float]]:
    """How a scorer agrees with people, by head and dimension; printed, and written for the report.

    Raises:
        DataError: no picture has a score of what is asked for.
    """
    parts = [range(first, min(first + BATCH, len(labels))) for first in range(0, len(labels), BATCH)]
    scores = torch.cat([scorer.scores([labels.open(row) for row in part]) for part in parts])
    root, found = scorer.scale.root, {}
    for number, name in enumerate(scorer.columns):
        right = labels.scores[:, root if number < len(HEADS) else number - len(HEADS)]
        known = ~right.isnan()
        if known.any():
            pair = (scores[known, number].double().numpy(), right[known].double().numpy())
            found[name] = agreement(*pair, levels=len(scorer.scale.levels))
    shown = ("SRCC", "PLCC", "KRCC", "MSE", "MAE", "accuracy", "F1")
    say(f"{'':<32}" + "".join(f"{name:>10}" for name in shown))
    for name, values in found.items():
        say(f"{name:<32}" + "".join(f"{values[metric]:>10.3f}" for metric in shown))
    if out is not None:
        rows: list[list[str | int | float | None]] = [
            [name, *(None if value != value else round(value, 6) for value in of.values())]
            for name, of in found.items()
        ]
        columns = ["score", *next(iter(found.values()))]
        text = f"{len(labels):,} labelled pictures (atoll aesthetics evaluate)."
        finding = ReportTable(title="Agreement with people", text=text, columns=columns, rows=rows)
        finding.write(Store.open(out, create=True), "agreement")
    return found
