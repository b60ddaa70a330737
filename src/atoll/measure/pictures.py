"""Where pictures come from, in numbered batches, and the pass that turns them into features."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from atoll.base.console import Progress
from atoll.base.errors import ConfigError, DataError
from atoll.base.hashing import digest, digest_strings
from atoll.data.dataset import DataSet
from atoll.data.decode import BadImageError, decode
from atoll.data.folder import SUFFIXES
from atoll.encoders.extractors import ClipEncoder
from atoll.encoders.vision import VisionEncoder
from atoll.measure.features import FeatureSet


@dataclass(frozen=True)
class Batch:
    """Some pictures.

    Attributes:
        numbers: of the pictures.
        pictures: all of one size.
        captions: one each; None where there are none.
    """

    numbers: Sequence[int]
    pictures: Sequence[Image.Image]
    captions: Sequence[str] | None = None


class Source(Protocol):
    """Numbered pictures of one size."""

    def __len__(self) -> int: ...

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        ...

    def batches(self, part: range, batch: int) -> Iterator[Batch]:
        """The pictures of a range of numbers; every number is in exactly one batch."""
        ...


class Folder:
    """The image files below a folder, by their paths.

    Raises:
        DataError: there is no such folder, or no image in it.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            what = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
            raise DataError(what, "give a folder of images")
        found = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        self.folder, self.files = folder, sorted(found)
        if not self.files:
            raise DataError(f"{folder} holds no images", f"known are {', '.join(sorted(SUFFIXES))}")

    def __len__(self) -> int:
        return len(self.files)

    @cached_property
    def size(self) -> tuple[int, int]:
        """Width and height of the first picture."""
        return self._read(self.files[0]).size

    @cached_property
    def digest(self) -> str:
        """Digest of the files' bytes in order."""
        return digest_strings(map(_digest_of, self.files))

    def batches(self, part: range, batch: int) -> Iterator[Batch]:
        """Pictures in batches.

        Raises:
            DataError: an unreadable image, or one of another size than the first; names it.
        """
        for first in range(part.start, part.stop, batch):
            numbers = range(first, min(first + batch, part.stop))
            yield Batch(numbers, [self._sized(self.files[number]) for number in numbers])

    def _sized(self, path: Path) -> Image.Image:
        picture = self._read(path)
        if picture.size != self.size:
            (a, b), (c, d) = picture.size, self.size
            raise DataError(f"{path} is {a}x{b}, {self.files[0].name} is {c}x{d}", "bring all to one size")
        return picture

    def _read(self, path: Path) -> Image.Image:
        try:
            return decode(path.read_bytes())
        except BadImageError as error:
            raise DataError(f"{path}: {error}", "replace or remove it") from None
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}", "check its permissions") from None


def _digest_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", "check its permissions") from None


class Rows:
    """Pictures of a data set.

    Args:
        dataset: with pictures.
        split: `train`, `heldout` or `all`.

    Raises:
        DataError: no such rows, or no pictures.
    """

    def __init__(self, dataset: DataSet, split: str) -> None:
        everyone = np.arange(len(dataset), dtype=np.int64)
        self.dataset, self.split = dataset, split
        self.rows: NDArray[np.int64] = everyone if split == "all" else dataset.split(split)
        if not len(self.rows):
            raise DataError(f"{dataset.store.location} has no {split} rows", "choose another --split")
        if dataset.manifest.size is None:
            raise DataError(f"{dataset.store.location} has no pictures", "use the one it was made from")
        self.size = (dataset.manifest.size, dataset.manifest.size)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def digest(self) -> str:
        """Digest of the data set's content and the rows."""
        return digest({"content": self.dataset.content, "rows": self.rows.tolist()})

    def batches(self, part: range, batch: int) -> Iterator[Batch]:
        """Pictures in batches."""
        for first in range(part.start, part.stop, batch):
            numbers = range(first, min(first + batch, part.stop))
            yield Batch(numbers, [self.dataset.image(int(self.rows[number])) for number in numbers])


def share(count: int, batch: int, rank: int, size: int) -> range:
    """The numbers of one process out of several: whole batches, so that each batch is that of one process."""
    batches = -(-count // batch)
    first, last = (min(count, batches * part // size * batch) for part in (rank, rank + 1))
    return range(first, last)


def take_in(
    batches: Iterable[Batch],
    total: int,
    encoder: VisionEncoder,
    what: str,
    keep_rows: bool = False,
    scores: bool = False,
    quiet: bool = False,
) -> FeatureSet:
    """Turn pictures into features, batch by batch.

    Args:
        batches: of pictures.
        total: how many pictures are to come.
        encoder: gives the features.
        what: they are, for the line of progress.
        keep_rows: whether every picture's features are kept.
        scores: whether to take the CLIP score of every picture and its caption.
        quiet: say nothing.

    Raises:
        ConfigError: a CLIP score without CLIP or without captions.
    """
    made, progress = FeatureSet(encoder.width, keep_rows), Progress(what, total, unit="pictures")
    for batch in batches:
        features = encoder.encode(batch.pictures).numpy()
        own = clip_scores(encoder, features, batch.captions) if scores else None
        made.add(features, list(batch.numbers), own)
        if not quiet:
            progress(made.count)
    return made


def clip_scores(
    encoder: VisionEncoder, features: NDArray[np.float32], captions: Sequence[str] | None
) -> NDArray[np.float64]:
    """100 max(cos, 0) of every picture and its caption (Hessel et al. 2021, with weight 100), `(N,)`."""
    if not isinstance(encoder, ClipEncoder):
        raise ConfigError("the CLIP score needs CLIP", "give --extractor openai/clip-vit-large-patch14")
    if captions is None:
        raise ConfigError("the CLIP score needs captions", "leave it out, or evaluate a model with captions")
    pictures, texts = features.astype(np.float64), encoder.texts(captions).numpy().astype(np.float64)
    lengths = np.linalg.norm(pictures, axis=1) * np.linalg.norm(texts, axis=1)
    found: NDArray[np.float64] = 100 * ((pictures * texts).sum(1) / lengths).clip(0)
    return found
