"""Concepts in pictures, as two columns of the data set: numbers and probabilities of what a tagger saw.

Any tagger's tags can be imported; a CLIP of transformers and a linear tagger on the features that the
partition made anyway are built in. What is likelier than a threshold counts, and the threshold is chosen when
counting, since that of one tagger says nothing about another's.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import ArrayLike
from pyarrow import csv, json
from torch import Tensor

from atoll.base.errors import ConfigError, DataError, first_line
from atoll.base.hashing import sha256
from atoll.curate.vocabulary import TEXT, Vocabulary, ragged
from atoll.data.columns import Column, Progress
from atoll.data.dataset import DataSet, read_parquet
from atoll.encoders.vision import ClipEncoder, extractor

IMAGE, PROBABILITIES = "concepts-image", "concepts-image-probabilities"
PLAIN = "a photo."
FLOOR = 0.1
"""Probability below which a tag is not kept."""
Hits = Callable[[int], list[dict[int, float]]]
"""Of a shard's number, for every row the concepts' probabilities by their numbers."""
Tagger = dict[str, Any]
"""What tags depend on."""


def write_hits(
    dataset: DataSet, vocabulary: Vocabulary, tagger: Tagger, hits: Hits, progress: Progress | None = None
) -> Column:
    """Write (or find) both columns; `tagger` is plain data that changes whenever the hits would."""
    producer = {"vocabulary": vocabulary.hash, "concepts": len(vocabulary), "tagger": tagger, "floor": FLOOR}

    # Both columns are of one pass over the pictures; a cache of more shards would hold a whole data set.
    @lru_cache(maxsize=1)
    def kept(shard: int) -> list[dict[int, float]]:
        return [{n: p for n, p in sorted(row.items()) if p >= FLOOR} for row in hits(shard)]

    def probabilities(shard: int) -> dict[str, Tensor]:
        rows = kept(shard)
        flat = torch.tensor([p for row in rows for p in row.values()], dtype=torch.float32)
        return {"values": flat, "lengths": torch.tensor([len(row) for row in rows], dtype=torch.int32)}

    dataset.write_column(PROBABILITIES, producer, probabilities, kind="ragged")
    return dataset.write_column(
        IMAGE, producer, lambda shard: ragged(list(row) for row in kept(shard)), None, "ragged", progress
    )


def imported(dataset: DataSet, vocabulary: Vocabulary, path: Path) -> tuple[Tagger, Hits]:
    """Tags of a parquet file: `id` of the row, `concept`, and `probability` (1 where there is none)."""
    table = read_table(path)
    for name in ("id", "concept"):
        if name not in table.column_names:
            fix = "tags need id, concept and, if known, probability"
            raise DataError(f"{path} has no column {name!r}", fix)
    ids, names = table["id"].to_pylist(), table["concept"].to_pylist()
    given = table["probability"].to_pylist() if "probability" in table.column_names else [1.0] * len(ids)
    # Rows and concepts that this data set does not know are passed over: a tagger's file may cover more.
    places = {id_: row for row, id_ in enumerate(dataset.ids)}
    rows: dict[int, dict[int, float]] = defaultdict(dict)
    strangers = 0
    for line, (id_, name, value) in enumerate(zip(ids, names, given, strict=True)):
        # NaN compares false with everything, so it is refused too.
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise DataError(f"{path}, row {line}: probability {value!r}", "give numbers from 0 to 1")
        row, number = places.get(str(id_)), vocabulary.number(str(name))
        strangers += row is None
        if row is not None and number is not None:
            rows[row][number] = max(float(value), rows[row].get(number, 0.0))
    if strangers == len(ids):
        raise DataError(f"{path} tags no row of {dataset.store.location}", "give the tags of this data set")
    bounds = dataset.bounds

    def hits(shard: int) -> list[dict[int, float]]:
        return [rows.get(row, {}) for row in range(int(bounds[shard]), int(bounds[shard + 1]))]

    return {"name": "imported", "tags": sha256(path.read_bytes()), "other rows": strangers}, hits


def read_table(path: Path) -> pa.Table:
    """A parquet, CSV or JSON-lines file; `DataError` where it is none of them."""
    try:
        if path.suffix == ".csv":
            return csv.read_csv(path)
        if path.suffix in (".json", ".jsonl"):
            return json.read_json(path)
        return read_parquet(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or first_line(error)}", "check it") from None
    except (pa.ArrowException, ValueError) as error:
        known = "parquet, CSV or JSON lines"
        raise DataError(f"{path} is no {known} ({first_line(error)[:120]})", f"give {known}") from None


def numeric(table: pa.Table) -> list[str]:
    """Names of a table's columns of numbers."""
    kinds = ((field.name, field.type) for field in table.schema)
    return [name for name, kind in kinds if pa.types.is_integer(kind) or pa.types.is_floating(kind)]


def of_labels(dataset: DataSet, vocabulary: Vocabulary) -> tuple[Tagger, Hits]:
    """Class labels: the concept of label N is the vocabulary's Nth."""
    labels, bounds = dataset.labels, dataset.bounds
    if int(labels.max()) >= len(vocabulary):
        what = f"label {int(labels.max())} for {len(vocabulary)} concepts"
        raise DataError(what, "give a vocabulary of the classes' names, in the labels' order")

    def hits(shard: int) -> list[dict[int, float]]:
        return [{int(label): 1.0} for label in labels[int(bounds[shard]) : int(bounds[shard + 1])]]

    return {"name": "labels"}, hits


def linear(
    dataset: DataSet, vocabulary: Vocabulary, features: str, epochs: int = 20, least: int = 5
) -> tuple[Tagger, Hits]:
    """A linear tagger on a column of features, fitted to the captions' hits of the training rows.

    A concept of fewer than `least` rows is never seen.
    """
    column, text = dataset.column(features), dataset.column(TEXT)

    def unit(rows: ArrayLike) -> Tensor:
        # Unit variance, not unit length: the learning rate then fits features of any width.
        values = column.read(rows).float()
        normal: Tensor = torch.nn.functional.normalize(values, dim=1) * values.shape[1] ** 0.5
        return normal

    if text.meta.producer.get("vocabulary") != vocabulary.hash:
        raise DataError("the captions are indexed by another vocabulary", "run 'atoll concepts index' again")
    torch.manual_seed(0)  # the tagger is named by its settings, so they must decide its tags
    train = dataset.split("train")
    count = torch.zeros(len(vocabulary))
    values, mask = text.read_ragged(train)
    count.index_add_(0, values[mask].long(), torch.ones(int(mask.sum())))
    seen = torch.where(count >= least)[0]
    if not len(seen):
        raise DataError(f"no concept is in {least} captions", "use a tagger that was trained elsewhere")
    place = torch.full((len(vocabulary),), -1)
    place[seen] = torch.arange(len(seen))
    network = torch.nn.Linear(int(column.meta.shape[0]), len(seen))
    torch.nn.init.zeros_(network.weight)
    prior = (count[seen] / len(train)).clamp(max=0.99)
    # From the concepts' own frequencies on: from zero, the first epochs would only learn that most are rare.
    network.bias.data = torch.log(prior / (1 - prior))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    for _ in range(epochs):
        for rows in np.array_split(np.random.default_rng(0).permutation(train), max(1, len(train) // 512)):
            values, mask = text.read_ragged(rows)
            target = torch.zeros(len(rows), len(seen))
            where = torch.arange(len(rows))[:, None].expand_as(values)
            there = mask & (place[values.long()] >= 0)
            target[where[there], place[values[there].long()]] = 1
            loss = torch.nn.functional.binary_cross_entropy_with_logits(network(unit(rows)), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    bounds = dataset.bounds

    @torch.inference_mode()
    def hits(shard: int) -> list[dict[int, float]]:
        likely = network(unit(np.arange(bounds[shard], bounds[shard + 1]))).sigmoid()
        return [
            {int(seen[n]): float(row[n]) for n in torch.where(row >= FLOOR)[0].tolist()} for row in likely
        ]

    settings = {"name": "linear", "features": column.meta.producer, "epochs": epochs, "least": least}
    return {**settings, "rows": dataset.id_hash, "concepts seen": len(seen)}, hits


def clip(dataset: DataSet, vocabulary: Vocabulary, name: str) -> tuple[Tagger, Hits]:
    """A CLIP of transformers, by folder or hub name.

    The probability of a concept is that of "a photo of a CONCEPT." against "a photo." alone, so it does not
    depend on the other concepts: the logistic function of the difference of their cosines by CLIP's scale.
    """
    encoder = extractor(name)
    if not isinstance(encoder, ClipEncoder):
        raise ConfigError(f"{name!r} is no CLIP", "give the folder or hub name of one")
    prompts = [PLAIN, *(f"a photo of a {concept}." for concept in vocabulary.concepts)]
    parts = [encoder.texts(prompts[first : first + 256]) for first in range(0, len(prompts), 256)]
    texts = torch.nn.functional.normalize(torch.cat(parts), dim=1)
    network: Any = encoder.network
    scale = float(network.logit_scale.exp())

    def hits(shard: int) -> list[dict[int, float]]:
        pictures = torch.nn.functional.normalize(encoder.encode(list(dataset.iter_images(shard))), dim=1)
        cosines = pictures @ texts.T
        likely = (scale * (cosines[:, 1:] - cosines[:, :1])).sigmoid()
        return [{int(n): float(row[n]) for n in torch.where(row >= FLOOR)[0]} for row in likely]

    return {"name": f"clip {name}", "weights": encoder.producer(), "prompts": [PLAIN, prompts[1]]}, hits
