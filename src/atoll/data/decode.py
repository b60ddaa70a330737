"""Image files of any origin, made into pictures of one size."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from atoll.base.errors import DataError

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""What is decoded; others that Pillow knows start programs (EPS) or are rarely tried."""
MOST_PIXELS = 89_478_485
"""Pixels above which a file counts as a decompression bomb; Pillow's own limit."""


class BadImageError(Exception):
    """A file that gives no picture: `reason` is one of a few words, `detail` says what exactly."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}: {detail}")


def decode(data: bytes) -> Image.Image:
    """The picture in the bytes of a file, upright, RGB or L, transparent parts over white.

    Raises:
        BadImageError: unreadable, truncated, or a decompression bomb.
    """
    with _opened(data) as image:
        image.load()
        return _flat(_upright(image))


def open_picture(path: Path) -> Image.Image:
    """The picture of a file, as `decode` gives it; `DataError` in one line where it is none."""
    try:
        return decode(path.read_bytes())
    except BadImageError as error:
        raise DataError(f"{path}: {error}", "replace or remove it") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}", "check its permissions") from None


def upright_size(data: bytes) -> tuple[int, int]:
    """Width and height of what `decode` gives, by the head of the file.

    Raises:
        BadImageError: unreadable, or a decompression bomb.
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
    middle = image.crop((left, top, left + side, top + side))
    return middle.resize((size, size), Image.Resampling.LANCZOS)


def is_gray(image: Image.Image) -> bool:
    """Whether a picture has no colour, whatever its mode."""
    if image.mode == "L":
        return True
    red, green, blue = (channel.tobytes() for channel in image.convert("RGB").split())
    return red == green == blue


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF beside a sound picture
        return image


def _flat(image: Image.Image) -> Image.Image:
    """RGB or L."""
    if image.mode.startswith(("I", "F")):
        return _from_deep(image)
    if image.mode == "LAB":  # Pillow turns it into other colours
        raise BadImageError("unreadable", "Lab colours")
    if image.has_transparency_data:
        colour = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        flat = Image.alpha_composite(white, colour).convert("RGB")
        return flat.convert("L") if image.mode in ("L", "LA", "La") else flat
    return image.convert("L" if image.mode in ("L", "1", "LA") else "RGB")


def _from_deep(image: Image.Image) -> Image.Image:
    """16-bit gray as 8-bit; Pillow's own conversion clips instead of scaling."""
    if image.mode.startswith("F"):
        raise BadImageError("unreadable", "floating-point pixels")
    levels = np.asarray(image).astype(np.int64)
    return Image.fromarray((levels.clip(0, 65535) // 257).astype(np.uint8))
