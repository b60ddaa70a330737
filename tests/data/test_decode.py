import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from atoll.data.decode import BadImageError, decode, is_gray, square


def save(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims to be huge."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_reads_every_format(kind: str) -> None:
    image = decode(save(Image.new("RGB", (7, 5), (200, 30, 40)), kind))
    assert (image.size, image.mode) == ((7, 5), "RGB")
    assert np.allclose(np.asarray(image)[2, 3], (200, 30, 40), atol=6)


def test_transparent_parts_are_white() -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (255, 0, 0, 255))
    assert np.asarray(decode(save(image))).tolist() == [[[255, 255, 255], [255, 0, 0]]]
    gray = decode(save(Image.new("LA", (1, 1), (0, 0))))
    assert (gray.mode, gray.getpixel((0, 0))) == ("L", 255)
    palette = Image.new("P", (1, 1))
    palette.putpalette([10, 20, 30])
    assert decode(save(palette, transparency=0)).getpixel((0, 0)) == (255, 255, 255)


def test_turns_by_exif() -> None:
    image = Image.new("RGB", (4, 2))
    exif = image.getexif()
    exif[0x0112] = 6
    assert decode(save(image, "JPEG", exif=exif)).size == (2, 4)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    deep = Image.fromarray(np.array([[0, 257 * 100, 65535]], dtype=np.uint16))
    assert np.asarray(decode(save(deep))).tolist() == [[0, 100, 255]]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "unreadable"),
        (b"this is text, not a picture", "unreadable"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unreadable"),
        (png_header(60_000, 60_000), "decompression bomb"),
        (png_header(10_000, 9_000), "decompression bomb"),
        (png_header(20, 20), "truncated"),
    ],
)
def test_bad_bytes(data: bytes, reason: str) -> None:
    with pytest.raises(BadImageError) as error:
        decode(data)
    assert error.value.reason == reason


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_every_truncation_is_bad_and_none_is_a_crash(kind: str) -> None:
    rng = np.random.default_rng(0)
    data = save(Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)), kind)
    for length in range(0, len(data) // 2, 7):
        with pytest.raises(BadImageError) as error:
            decode(data[:length])
        assert error.value.reason in ("truncated", "unreadable")
    with pytest.raises(BadImageError) as error:
        decode(data[: len(data) // 2])
    assert error.value.reason == "truncated"


def test_square_takes_the_middle() -> None:
    image = Image.new("RGB", (30, 10), "white")
    image.paste("black", (10, 0, 20, 10))
    assert np.asarray(square(image, 5)).max() == 0


def test_gray_is_a_matter_of_pixels_not_of_mode() -> None:
    assert is_gray(Image.new("RGB", (2, 2), (7, 7, 7)))
    assert not is_gray(Image.new("RGB", (2, 2), (7, 7, 8)))
