import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, features

from atoll.base.errors import DataError
from atoll.data.decode import BadImageError, decode, is_gray, open_picture, square
from atoll.data.sources.folder import _read_csv, _read_jsonl
from helpers_data import saved


def png(
    width: int = 7, height: int = 5, bits: int = 8, colour: int = 2, interlace: int = 0, **chunks: bytes
) -> bytes:
    """A PNG by hand, all of it one row repeated; `chunks` come before its pixels, `IDAT` in their place."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    samples = np.array({2: RED, 0: RED[:1], 6: (*RED, 255)}[colour]) * (257 if bits == 16 else 1)
    row = b"\0" + samples.astype(">u2" if bits == 16 else "u1").tobytes() * min(width, 100)
    pixels = chunks.pop("IDAT", zlib.compress(row * min(height, 100)))
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, interlace)
    parts = [(b"IHDR", header), *((name.encode(), data) for name, data in chunks.items()), (b"IDAT", pixels)]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts) + chunk(b"IEND", b"")


RED = (200, 30, 40)
PICTURE = Image.new("RGB", (7, 5), RED)
CLEAR = Image.new("RGBA", (7, 5), (*RED, 0))
ROW = b"\0" + bytes(RED) * 7
PROFILE = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (7, 5), "blue")]}
WHITE, GRAY = (255, 255, 255), PICTURE.convert("L").getpixel((0, 0))


def transparent(kind: str) -> bytes:
    palette = Image.new("P", (7, 5))
    palette.putpalette([10, 20, 30])
    return saved(palette, kind, transparency=0)


def turned(orientation: int) -> bytes:
    exif = PICTURE.getexif()
    exif[0x0112] = orientation
    return saved(PICTURE, "JPEG", exif=exif)


def values(kind: type, mode: str | None = None) -> Image.Image:
    return Image.fromarray(np.full((5, 7), 100 if kind is np.float32 else 257 * 100, kind), mode)


def bmp(width: int, height: int) -> bytes:
    data = bytearray(saved(PICTURE, "BMP"))
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)


def gif(width: int, height: int) -> bytes:
    data = bytearray(saved(PICTURE, "GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    start = data.index(b",")
    data[start + 5 : start + 9] = struct.pack("<HH", width, height)
    return bytes(data)


def jpeg(width: int, height: int) -> bytes:
    data = bytearray(saved(PICTURE, "JPEG"))
    start = data.index(b"\xff\xc0") + 5
    data[start : start + 4] = struct.pack(">HH", height, width)
    return bytes(data)


GOOD: dict[str, tuple[bytes, object]] = {
    "png": (saved(PICTURE), RED),
    "png, gray": (saved(PICTURE.convert("L")), GRAY),
    "png, one bit": (saved(Image.new("1", (7, 5), 1)), 255),
    "png, palette": (saved(PICTURE.quantize()), RED),
    "png, transparent": (saved(CLEAR), WHITE),
    "png, transparent gray": (saved(Image.new("LA", (7, 5), (0, 0))), 255),
    "png, transparent palette": (transparent("PNG"), WHITE),
    "png, one transparent colour": (png(tRNS=struct.pack(">HHH", *RED)), WHITE),
    "png, 16 bits gray": (saved(values(np.uint16)), 100),
    "png, 16 bits colour": (png(bits=16), RED),
    "png, 16 bits with alpha": (png(bits=16, colour=6, IDAT=zlib.compress(bytes(57) * 5)), WHITE),
    "png, interlaced": (png(1, 1, interlace=1), RED),
    "png, a profile": (saved(PICTURE, icc_profile=PROFILE), RED),
    "png, a profile of garbage": (png(iCCP=b"x\0\0garbage"), RED),
    "png, a gamma": (png(gAMA=struct.pack(">I", 1)), RED),
    "png, EXIF of garbage": (png(eXIf=b"garbage"), RED),
    "png, animated": (saved(PICTURE, **FRAMES), RED),
    "png, more pixels than it says": (png(IDAT=zlib.compress(ROW * 5 + bytes(10**7))), RED),
    "png, and garbage": (saved(PICTURE) + b"garbage" * 99, RED),
    "png, and a script": (saved(PICTURE) + b"<script>alert(1)</script>", RED),
    "png, one pixel": (png(1, 1), RED),
    "png, a line": (saved(PICTURE.resize((5000, 1))), RED),
    "jpeg": (saved(PICTURE, "JPEG"), RED),
    "jpeg, gray": (saved(PICTURE.convert("L"), "JPEG"), GRAY),
    "jpeg, progressive": (saved(PICTURE, "JPEG", progressive=True), RED),
    "jpeg, all colours": (saved(PICTURE, "JPEG", subsampling=0), RED),
    "jpeg, CMYK": (saved(PICTURE.convert("CMYK"), "JPEG"), RED),
    "jpeg, and garbage": (saved(PICTURE, "JPEG") + b"garbage", RED),
    "jpeg, a comment": (saved(PICTURE, "JPEG", comment=b"x" * 60000), RED),
    "jpeg, a profile of garbage": (saved(PICTURE, "JPEG", icc_profile=b"garbage"), RED),
    "jpeg, EXIF of garbage": (saved(PICTURE, "JPEG", exif=b"Exif\0\0garbage"), RED),
    "jpeg, an orientation of 99": (turned(99), RED),
    **{f"jpeg, turned {n}": (turned(n), RED) for n in range(1, 9)},
    "jpeg, two pictures": (saved(PICTURE, "MPO", **FRAMES), RED),
    "webp": (saved(PICTURE, "WEBP"), RED),
    "webp, lossless": (saved(PICTURE, "WEBP", lossless=True), RED),
    "webp, transparent": (saved(CLEAR, "WEBP", lossless=True), WHITE),
    "webp, animated": (saved(PICTURE, "WEBP", **FRAMES), RED),
    "gif": (saved(PICTURE, "GIF"), RED),
    "gif, transparent": (transparent("GIF"), WHITE),
    "gif, animated": (saved(PICTURE, "GIF", **FRAMES), RED),
    "bmp": (saved(PICTURE, "BMP"), RED),
    "bmp, palette": (saved(PICTURE.quantize(), "BMP"), RED),
    "bmp, one bit": (saved(Image.new("1", (7, 5), 1), "BMP"), 255),
    "bmp, from the top": (bmp(7, -5), RED),
    "tiff": (saved(PICTURE, "TIFF"), RED),
    "tiff, LZW": (saved(PICTURE, "TIFF", compression="tiff_lzw"), RED),
    "tiff, deflate": (saved(PICTURE, "TIFF", compression="tiff_adobe_deflate"), RED),
    "tiff, packed": (saved(PICTURE, "TIFF", compression="packbits"), RED),
    "tiff, 16 bits": (saved(values(np.uint16), "TIFF"), 100),
    "tiff, 32 bits": (saved(values(np.int32), "TIFF"), 100),
    "tiff, CMYK": (saved(PICTURE.convert("CMYK"), "TIFF"), RED),
    "tiff, YCbCr": (saved(PICTURE.convert("YCbCr"), "TIFF"), RED),
}
"""Files by what they are, and the colour that they show."""


@pytest.mark.parametrize("name", GOOD)
def test_what_is_a_picture_is_converted(name: str) -> None:
    data, colour = GOOD[name]
    image = decode(data)
    assert image.mode == ("L" if isinstance(colour, int) else "RGB")
    assert np.abs(np.asarray(image).astype(int) - np.array(colour)).max() <= 8


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "unreadable"),
    "text": (b"this is text, not a picture", "unreadable"),
    "HTML": (b"<!doctype html><title>404</title>", "unreadable"),
    "JSON": (b'{"error": "expired"}', "unreadable"),
    "zeros": (bytes(1000), "unreadable"),
    "pickle": (b"\x80\x04cos\nsystem\n.", "unreadable"),
    "zip": (b"PK\x03\x04" + bytes(100), "unreadable"),
    "EPS, a program": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unreadable"),
    "PDF": (b"%PDF-1.7\n", "unreadable"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unreadable"),
    "HEIC": (b"\0\0\0\x18ftypheic" + bytes(100), "unreadable"),
    "AVIF": (saved(PICTURE, "AVIF") if features.check("avif") else b"\0\0\0\x18ftypavif", "unreadable"),
    "icon": (saved(PICTURE, "ICO"), "unreadable"),
    "Photoshop": (b"8BPS\0\x01" + bytes(100), "unreadable"),
    "PPM": (saved(PICTURE, "PPM"), "unreadable"),
    "TGA": (saved(PICTURE, "TGA"), "unreadable"),
    "XBM": (saved(Image.new("1", (7, 5)), "XBM"), "unreadable"),
    "png, its first bytes": (b"\x89PNG\r\n\x1a\n", "unreadable"),
    "png, no pixels": (png(20, 20, IDAT=zlib.compress(b"")), "truncated"),
    "png, few pixels": (png(20, 20, IDAT=zlib.compress(bytes(99))), "truncated"),
    "png, pixels of garbage": (png(IDAT=b"garbage"), "unreadable"),
    "png, a wrong sum": (saved(PICTURE)[:29] + b"xxxx" + saved(PICTURE)[33:], "unreadable"),
    "png, of no size": (png(0, 0), "unreadable"),
    "png, unknown colours": (png(bits=7), "unreadable"),
    "png, a bomb": (png(60_000, 60_000), "decompression bomb"),
    "png, a smaller bomb": (png(10_000, 9_000), "decompression bomb"),
    "png, a bomb of text": (png(zTXt=b"x\0\0" + zlib.compress(bytes(10**8))), "unreadable"),
    "jpeg, its first bytes": (b"\xff\xd8\xff\xe0", "unreadable"),
    "jpeg, of no size": (jpeg(0, 0), "unreadable"),
    "jpeg, half": (saved(PICTURE, "JPEG")[:-20], "truncated"),
    "jpeg, a bomb": (jpeg(65_000, 65_000), "decompression bomb"),
    "webp, its first bytes": (b"RIFF\x10\0\0\0WEBPVP8 ", "unreadable"),
    "webp, half": (saved(PICTURE, "WEBP")[:-20], "unreadable"),
    "gif, its first bytes": (b"GIF89a", "unreadable"),
    "gif, half": (saved(PICTURE, "GIF")[:-8], "truncated"),
    "gif, a bomb": (gif(65_000, 65_000), "decompression bomb"),
    "bmp, its first bytes": (b"BM", "unreadable"),
    "bmp, half": (saved(PICTURE, "BMP")[:-30], "truncated"),
    "bmp, a bomb": (bmp(65_000, 65_000), "decompression bomb"),
    "tiff, its first bytes": (b"II*\0", "unreadable"),
    "tiff, half": (saved(PICTURE, "TIFF")[:-60], "truncated"),
    "tiff, floating point": (saved(values(np.float32), "TIFF"), "unreadable"),
    "tiff, Lab": (saved(Image.new("LAB", (7, 5)), "TIFF"), "unreadable"),
}
"""Files by what they are, and the reason that they are rejected for."""


@pytest.mark.parametrize("name", BAD)
def test_what_is_none_is_rejected(name: str) -> None:
    data, reason = BAD[name]
    with pytest.raises(BadImageError) as error:
        decode(data)
    assert error.value.reason == reason, error.value


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    deep = Image.fromarray(np.array([[0, 257 * 100, 65535]], dtype=np.uint16))
    assert np.asarray(decode(saved(deep))).tolist() == [[0, 100, 255]]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_every_truncation_is_bad_and_none_is_a_crash(kind: str) -> None:
    rng = np.random.default_rng(0)
    data = saved(Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)), kind)
    for length in range(0, len(data) // 2, 7):
        with pytest.raises(BadImageError) as error:
            decode(data[:length])
        assert error.value.reason in ("truncated", "unreadable")
    with pytest.raises(BadImageError) as error:
        decode(data[: len(data) // 2])
    assert error.value.reason == "truncated"


@pytest.mark.parametrize("read", [open_picture, _read_csv, _read_jsonl])
def test_a_file_that_breaks_off_while_it_is_read_is_named(read, tmp_path):
    """Errors of opening name the file and those of reading do not, as of a process's memory at address 0."""
    (link := tmp_path / "file").symlink_to("/proc/self/mem")
    with pytest.raises(DataError, match=f"cannot read {link}: Input/output error"):
        read(link)


def test_square_takes_the_middle() -> None:
    image = Image.new("RGB", (30, 10), "white")
    image.paste("black", (10, 0, 20, 10))
    assert np.asarray(square(image, 5)).max() == 0


def test_gray_is_a_matter_of_pixels_not_of_mode() -> None:
    assert is_gray(Image.new("RGB", (2, 2), (7, 7, 7)))
    assert not is_gray(Image.new("RGB", (2, 2), (7, 7, 8)))
