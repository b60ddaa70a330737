"""Where pictures come from, in numbered batches, and their features.

Sources are folders and data sets, and a model (`models.Drawn`). Features of all of a set are in memory, by
number: 50,000 of Inception's take 0.4 GB.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from atoll.base.errors import DataError
from atoll.base.hashing import digest, digest_strings, sha256
from atoll.base.rng import generator
from atoll.data.columns import some_rows
from atoll.data.dataset import DataSet
from atoll.data.decode import open_picture, pictures_below
from atoll.encoders.vision import ClipEncoder, VisionEncoder
from atoll.measure.metrics.projection import must_be_finite
from atoll.measure.same_noise import SavedSamples
from atoll.measure.shards import FEW, ShardedRows, cut
from atoll.model.dispatch import Trace
from atoll.store.store import Store

F32 = NDArray[np.float32]
SPLITS = {"heldout": "held-out", "test": "test", "train": "training"}
AT_ONCE = 64
"""Pictures that an extractor sees at once, however they are drawn."""


@dataclass(frozen=True)
class Batch:
    """Some pictures of one size, with their captions, and of an ensemble with who drew them."""

    numbers: Sequence[int]
    pictures: Sequence[Image.Image]
    captions: Sequence[str] | None = None
    trace: Trace | None = None
    seconds: float = 0.0


class Source(Protocol):
    """Numbered pictures of one size."""

    @property
    def subject(self) -> dict[str, Any]:
        """Name of what the pictures are of, and digests of its weights or pictures."""
        ...

    @property
    def about(self) -> dict[str, Any]:
        """Fields of the protocol: how the pictures were drawn."""
        ...

    @property
    def reusable(self) -> bool:
        """Whether `subject` and `about` decide the pictures, so that what was measured holds for ever."""
        ...

    def __len__(self) -> int: ...

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        ...

    def batches(self, part: range, batch: int) -> Iterator[Batch]:
        """The pictures of a range of numbers; every number is in exactly one batch."""
        ...


class Folder:
    """The image files below a folder, by their paths; `DataError` where there is none."""

    reusable = True

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            what = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
            raise DataError(what, "give a folder of images")
        self.about = {"rounding": "8-bit files"}
        self.folder, self.files = folder, pictures_below(folder)

    def __len__(self) -> int:
        return len(self.files)

    @property
    def subject(self) -> dict[str, Any]:
        """Name and digest of the folder."""
        return {"name": self.folder.name or str(self.folder), "pictures": self.digest}

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height of the first picture."""
        return open_picture(self.files[0]).size

    @cached_property
    def digest(self) -> str:
        """Digest of the files' bytes in order."""
        digests = list[str]()
        for path in self.files:
            try:
                digests.append(sha256(path))
            except OSError as error:
                raise DataError(f"cannot read {path}: {error.strerror}", "check its permissions") from None
        return digest_strings(digests)

    def batches(self, part: range, batch: int) -> Iterator[Batch]:
        """Pictures in batches; `DataError` names an unreadable one, or one of another size than the first."""
        for numbers in cut(part, batch):
            pictures = [open_picture(self.files[number]) for number in numbers]
            for number, picture in zip(numbers, pictures, strict=True):
                if picture.size != self.size:
                    (a, b), (c, d), first = picture.size, self.size, self.files[0].name
                    what = f"{self.files[number]} is {a}x{b}, {first} is {c}x{d}"
                    raise DataError(what, "bring all to one size")
            yield Batch(numbers, pictures)


def of_usual_size(dataset: DataSet, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of some rows whose pictures are of one size: of several, the one nearest to a square.

    It is what a model draws where nothing is said, so that like is compared with like.
    """
    if dataset.buckets is None:
        return rows
    sizes = np.unique(dataset.buckets, axis=0)
    usual = sizes[(sizes.max(1) / sizes.min(1)).argmin()]
    chosen: NDArray[np.int64] = rows[(dataset.buckets[rows] == usual).all(1)]
    return chosen


def measured_rows(dataset: DataSet, split: str) -> NDArray[np.int64]:
    """Rows of a split whose pictures are of the usual size; `DataError` where there are none."""
    rows = of_usual_size(dataset, dataset.split(split))
    if not len(rows):
        size = " of the size nearest to a square" if dataset.buckets is not None else ""
        fix = "raise data.ingest.heldout or test, or set evaluate.conditions=train and --split train,"
        fix = f"{fix} or diagnose.splits=[train] and diagnose.conditions=train"
        raise DataError(f"the data set has no {SPLITS[split]} rows{size}", fix)
    return rows


class Rows:
    """Pictures of a split (or `all`) of a data set, or some of its rows; of rows that keep their aspect those
    nearest to a square. `DataError` where there are none."""

    reusable = True

    def __init__(self, dataset: DataSet, split: str, rows: NDArray[np.int64] | None = None) -> None:
        everyone = np.arange(len(dataset), dtype=np.int64)
        whole = of_usual_size(dataset, everyone if split == "all" else dataset.split(split))
        self.dataset, self.split, self.rows = dataset, split, whole if rows is None else rows
        self.about = {"rounding": "8-bit files"}
        if not len(self.rows):
            raise DataError(f"{dataset.store.location} has no {split} rows", "choose another --split")
        if dataset.manifest.size is None:
            raise DataError(f"{dataset.store.location} has no pictures", "use the one it was made from")
        sides = [dataset.manifest.size] * 2 if dataset.buckets is None else dataset.buckets[self.rows[0]]
        self.size = int(sides[0]), int(sides[1])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def subject(self) -> dict[str, Any]:
        """Name and digest of the rows."""
        return {"name": f"{self.split} pictures", "pictures": self.digest}

    @cached_property
    def digest(self) -> str:
        """Digest of the data set's content and the rows."""
        return digest({"content": self.dataset.content, "rows": self.rows.tolist()})

    def batches(self, part: range, batch: int) -> Iterator[Batch]:
        """Pictures in batches."""
        for numbers in cut(part, batch):
            yield Batch(numbers, [self.dataset.image(int(self.rows[number])) for number in numbers])


def training_pictures(dataset: DataSet, seed: int, stream: str, count: int) -> Rows:
    """So many training pictures of one size, drawn by a seed."""
    train = of_usual_size(dataset, dataset.split("train"))
    return Rows(dataset, "train", some_rows(train, count, generator(seed, stream)))


# What an extractor sees in them.


COSTS = ("seconds", "draw_seconds", "rows", "expert_calls", "router_calls", "router_flops", "expert_flops")
"""Columns of a shard's cost: seconds in all and of drawing; rows that networks saw at each step, both
branches of guidance counted; calls and FLOPs as in a trace."""


@dataclass(frozen=True, eq=False)
class Features:
    """Features `(N, D)` of pictures by number, and where metrics ask for them the captions' `(N, D)`."""

    rows: F32
    texts: F32 | None = None

    @classmethod
    def of(cls, made: Mapping[str, Tensor]) -> "Features":
        """Those of an `extraction`."""
        return cls(made["features"].numpy(), made["texts"].numpy() if "texts" in made else None)


def extraction(
    store: Store,
    source: Source,
    encoder: VisionEncoder,
    name: str,
    batch: int,
    captions: bool = False,
    keep: bool = False,
) -> ShardedRows:
    """Features of all pictures of a source, if asked of their captions too, and the cost (`COSTS`, a row for
    each shard); to `keep` also the values of the first pictures, as `SavedSamples` has them."""

    def make(part: range) -> dict[str, Tensor]:
        start, cost = time.monotonic(), dict.fromkeys(COSTS, 0.0)
        pixels = dict[int, NDArray[np.uint8]]()

        def watched() -> Iterator[Batch]:
            for drawn in source.batches(part, batch):
                cost["draw_seconds"] += drawn.seconds
                if drawn.trace is not None:
                    cost["rows"] += len(drawn.numbers) * drawn.trace.branches
                    for column in COSTS[3:]:
                        cost[column] += getattr(drawn.trace, column)
                if keep:
                    pixels.update(SavedSamples.pixels_of(drawn.numbers, drawn.pictures))
                yield drawn

        rows = np.empty((len(part), encoder.width), dtype=np.float32)
        texts = np.empty_like(rows)
        for numbers, pictures, words in _chunks(watched()):
            index = np.array(numbers) - part.start
            rows[index] = encoded(encoder, pictures, len(source))
            if captions:
                texts[index] = cast(ClipEncoder, encoder).texts(words)  # `Metric.only`
        cost["seconds"] = time.monotonic() - start
        arrays = {"features": rows, "cost": np.array([[*cost.values()]])}
        arrays |= {"texts": texts} if captions else {}
        if pixels:
            arrays["pixels"] = np.stack([pixels[number] for number in sorted(pixels)])
        return {array: torch.from_numpy(values) for array, values in arrays.items()}

    about: dict[str, Any] | None = None
    if source.reusable:
        about = {"subject": source.subject, "protocol": source.about, "extractor": encoder.producer()}
        about |= {"captions": captions, "keep": keep}
    return ShardedRows(store, about, name, len(source), batch, make)


def encoded(encoder: VisionEncoder, pictures: Sequence[Image.Image], count: int) -> F32:
    """Features of some pictures out of `count`; `DataError` where one is not finite."""
    parts = [pictures[first : first + AT_ONCE] for first in range(0, len(pictures), AT_ONCE)]
    # Few rows round otherwise than many: no shard ends in fewer than a whole run would.
    filled = [[*part, *[part[-1]] * (min(FEW, count) - len(part))] for part in parts]
    both = zip(filled, parts, strict=True)
    features = np.concatenate([encoder.encode(some).numpy()[: len(part)] for some, part in both])
    return must_be_finite(features).astype(np.float32)


def _chunks(batches: Iterable[Batch]) -> Iterator[tuple[list[int], list[Image.Image], list[str]]]:
    """Numbers, pictures and captions, as many as the extractor sees at once."""
    numbers, pictures, captions = list[int](), list[Image.Image](), list[str]()
    for drawn in batches:
        numbers += drawn.numbers
        pictures += drawn.pictures
        captions += drawn.captions or []
        while len(numbers) >= AT_ONCE:
            yield numbers[:AT_ONCE], pictures[:AT_ONCE], captions[:AT_ONCE]
            del numbers[:AT_ONCE], pictures[:AT_ONCE], captions[:AT_ONCE]
    if numbers:
        yield numbers, pictures, captions
