"""Aspect buckets: which size a picture gets so that it keeps its aspect, and how it is brought to it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from atoll.base.text import Size
from atoll.data.decode import BadImageError, upright_size
from atoll.data.records import Record
from atoll.data.settings import BucketConfig


class Placement(NamedTuple):
    """How a picture is brought to the size of its bucket; all in pixels.

    Attributes:
        bucket: width and height that it gets.
        resized: width and height of the whole picture when it covers the bucket.
        left: where the bucket begins in the resized picture.
        top: likewise.
    """

    bucket: Size
    resized: Size
    left: int
    top: int

    def fields(self) -> dict[str, int]:
        """Columns of the row."""
        width, height = self.bucket
        return {
            "bucket_width": width,
            "bucket_height": height,
            "crop_left": self.left,
            "crop_top": self.top,
        }


def nearest(widths: ArrayLike, heights: ArrayLike, buckets: Sequence[Size]) -> NDArray[np.int64]:
    """Number of the bucket whose aspect is nearest to that of each picture, as diffusers computes it."""
    across, down = np.asarray(widths, dtype=np.int64), np.asarray(heights, dtype=np.int64)
    wide, high = np.array(buckets, dtype=np.int64).T
    apart = np.abs(down[..., None] * wide - across[..., None] * high)
    numbers: NDArray[np.int64] = len(buckets) - 1 - apart[..., ::-1].argmin(-1)  # of equals the last
    return numbers


def place(picture: Size, buckets: Sequence[Size], config: BucketConfig) -> Placement:
    """Resize to cover the nearest bucket, and crop in the middle.

    Raises:
        BadImageError: `too small`, if it would be enlarged too much; `too long`, if it would lose too much.
    """
    (width, height), bucket = picture, buckets[int(nearest(*picture, buckets))]
    scale = max(bucket[0] / width, bucket[1] / height)
    named, into = f"{width}x{height}", f"{bucket[0]}x{bucket[1]}"
    if scale > config.max_upscale:
        raise BadImageError("too small", f"{named} would be enlarged {scale:.2f} times to cover {into}")
    lost = 1 - bucket[0] * bucket[1] / (width * scale * height * scale)
    if lost > config.max_crop + 1e-9:
        raise BadImageError("too long", f"{named} would lose {lost:.0%} to fit into {into}")
    resized = max(bucket[0], round(width * scale)), max(bucket[1], round(height * scale))
    return Placement(bucket, resized, (resized[0] - bucket[0]) // 2, (resized[1] - bucket[1]) // 2)


def cropped(image: Image.Image, where: Placement) -> Image.Image:
    """The picture at the size of its bucket, by Lanczos's filter.

    What is cropped is not resized first, so a panorama of any length needs no memory for the rest.
    """
    across, down = image.width / where.resized[0], image.height / where.resized[1]
    (width, height), (left, top) = where.bucket, where[2:]
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    return image.resize(where.bucket, Image.Resampling.LANCZOS, box=box)


def choose(records: Iterable[object], sizes: Sequence[Size], config: BucketConfig) -> list[Size]:
    """The buckets that hold enough of a source's pictures, by the heads of their files; at least one."""
    counts = Counter[Size]()
    for record in records:
        if isinstance(record, Record):
            image = record.image
            try:
                size = upright_size(image) if isinstance(image, bytes) else image.size
                place(size, sizes, config)
            except BadImageError:
                continue  # rejected, with its reason, when its shard is written
            counts[size] += 1
    return merged(counts, sizes, config.min_rows)


def merged(pictures: Mapping[Size, int], buckets: Sequence[Size], least: int) -> list[Size]:
    """The buckets without those of fewer than `least` pictures, smallest first; at least one stays.

    Args:
        pictures: how many there are of each width and height.
        buckets: widths and heights.
        least: pictures.
    """
    kept, count = list(buckets), np.array(list(pictures.values()))
    if not pictures:
        return kept
    widths, heights = np.array(list(pictures)).T
    while len(kept) > 1:
        held = np.bincount(nearest(widths, heights, kept), count, len(kept))
        if held.min() >= least:
            break
        del kept[int(held.argmin())]
    return kept
