"""Image files of any origin, made into squares, or into the buckets in which they keep their aspect."""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from atoll.base.errors import DataError
from atoll.base.safe_parse import files_below, unreadable
from atoll.base.text import Size
from atoll.data.settings import BucketConfig

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""What is decoded; others that Pillow knows start programs (EPS) or are rarely tried."""
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
"""Endings of the names of such files."""
MOST_PIXELS = 89_478_485
"""Pixels above which a file counts as a decompression bomb; Pillow's own limit."""


class BadImageError(Exception):
    """A file that gives no picture: `reason` is one of a few words, `detail` says what exactly."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


def decode(data: bytes) -> Image.Image:
    """The picture in the bytes of a file, upright, RGB or L, transparent parts over white.

    `BadImageError` where it is unreadable, truncated, or a decompression bomb.
    """
    with _opened(data) as image:
        image.load()
        with suppress(Exception):  # damaged EXIF beside a sound picture
            image = ImageOps.exif_transpose(image)
        return _flat(image)


def open_picture(path: Path) -> Image.Image:
    """The picture of a file, as `decode` gives it; `DataError` in one line where it is none."""
    try:
        return decode(path.read_bytes())
    except BadImageError as error:
        raise DataError(f"{path}: {error}", "replace or remove it") from None
    except OSError as error:
        unreadable(error, path)


def pictures_below(folder: Path) -> list[Path]:
    """The image files below a folder, by path; `DataError` where there are none."""
    if not (paths := files_below(folder, SUFFIXES)):
        raise DataError(f"{folder} holds no images", f"known are {', '.join(sorted(SUFFIXES))}")
    return paths


def upright_size(data: bytes) -> tuple[int, int]:
    """Width and height of what `decode` gives, by the head of the file.

    `BadImageError` where it is unreadable, or a decompression bomb.
    """
    with _opened(data) as image:
        # Pillow turns TIFF by itself.
        turns = image.format != "TIFF" and image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        return image.size[::-1] if turns else image.size


@contextmanager
def _opened(data: bytes) -> Iterator[Image.Image]:
    """A file whose head is read; `BadImageError` for whatever goes wrong then or afterwards."""
    Image.init()  # all of Pillow's formats; does nothing the second time
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on odd but readable files
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            if image.width * image.height > MOST_PIXELS:
                raise Image.DecompressionBombError(f"{image.width}x{image.height} pixels")
            yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadImageError("decompression bomb", str(error)) from None
    except UnidentifiedImageError:
        raise BadImageError("unreadable", f"not one of {', '.join(FORMATS)}") from None
    except Exception as error:  # decoders raise nearly anything on hostile bytes
        reason = "truncated" if "truncated" in str(error).lower() else "unreadable"
        raise BadImageError(reason, f"{type(error).__name__}: {error}") from None


def square(image: Image.Image, size: int) -> Image.Image:
    """The central square of a picture, resized with Lanczos's filter."""
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    # Cropped first: resizing with a box lets the filter see pixels beyond it.
    return image.crop((left, top, left + side, top + side)).resize((size, size), Image.Resampling.LANCZOS)


def is_gray(image: Image.Image) -> bool:
    """Whether a picture has no colour, whatever its mode."""
    if image.mode == "L":
        return True
    red, green, blue = (channel.tobytes() for channel in image.convert("RGB").split())
    return red == green == blue


def _flat(image: Image.Image) -> Image.Image:
    """RGB or L."""
    if image.mode.startswith("F"):
        raise BadImageError("unreadable", "floating-point pixels")
    if image.mode.startswith("I"):  # 16 bits: Pillow's own conversion clips instead of scaling
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) // 257).astype(np.uint8))
    if image.mode == "LAB":  # Pillow turns it into other colours
        raise BadImageError("unreadable", "Lab colours")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        flat = Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
        return flat.convert("L") if image.mode in ("L", "LA", "La") else flat
    return image.convert("L" if image.mode in ("L", "1", "LA") else "RGB")


class Placement(NamedTuple):
    """How a picture is brought to the size of its bucket; all in pixels."""

    bucket: Size  # that it gets
    resized: Size  # of the whole picture when it covers the bucket
    left: int  # where the bucket begins in the resized picture
    top: int


def nearest(widths: ArrayLike, heights: ArrayLike, buckets: Sequence[Size]) -> NDArray[np.int64]:
    """Number of the bucket whose aspect is nearest to that of each picture, as diffusers computes it."""
    across, down = np.asarray(widths, dtype=np.int64), np.asarray(heights, dtype=np.int64)
    wide, high = np.array(buckets, dtype=np.int64).T
    # Products and not ratios: whole numbers have no rounding that could break a tie differently.
    apart = np.abs(down[..., None] * wide - across[..., None] * high)
    numbers: NDArray[np.int64] = len(buckets) - 1 - apart[..., ::-1].argmin(-1)  # of equals the last
    return numbers


def place(picture: Size, buckets: Sequence[Size], config: BucketConfig) -> Placement:
    """Resize to cover the nearest bucket, and crop in the middle.

    `BadImageError` where it would be enlarged too much (`too small`), or lose too much (`too long`).
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
    # The box is that of the bucket in the source's own pixels.
    across, down = image.width / where.resized[0], image.height / where.resized[1]
    (width, height), (left, top) = where.bucket, where[2:]
    box = (left * across, top * down, (left + width) * across, (top + height) * down)
    return image.resize(where.bucket, Image.Resampling.LANCZOS, box=box)


def merged(pictures: Mapping[Size, int], buckets: Sequence[Size], least: int) -> list[Size]:
    """The buckets without those of fewer than `least` pictures, smallest first; at least one stays.

    `pictures` counts them by width and height.
    """
    sizes, counts = list(buckets), np.array(list(pictures.values()))
    if not pictures:
        return sizes
    widths, heights = np.array(list(pictures)).T
    # The smallest goes first, for its pictures may fill another one.
    while len(sizes) > 1:
        held = np.bincount(nearest(widths, heights, sizes), counts, len(sizes))
        if held.min() >= least:
            break
        del sizes[int(held.argmin())]
    return sizes
