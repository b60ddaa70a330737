"""A source that needs no download: characters of the type faces that matplotlib ships, with their names.

Every picture is dark on light, centred, and scaled so that it fits; small signs are enlarged, but a small
letter stays smaller than its capital. The caption is the character's Unicode name and the face, such as
"greek small letter alpha, serif bold". The group is the character with those that look like it in one of the
faces (Latin, Greek and Cyrillic A are one), so that no picture is both trained on and held out.
"""

import logging
import unicodedata
from collections.abc import Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageFont

from atoll.base.errors import DataError
from atoll.base.hashing import digest, sha256
from atoll.base.rng import seed_of
from atoll.data.formats import Reject
from atoll.data.settings import FACES, PRESETS, GlyphOptions
from atoll.data.sources.record import Record, Source

CANVAS = 64
"""Height and width of a rendered picture in pixels; the ingest resizes it."""
_LARGEST, _SMALLEST, _SIZE = 54.0, 26.0, 52.0
_LATIN = (("A", "Z"), ("a", "z"))
_RANGES = {"latin": _LATIN, "basic": (*_LATIN, ("Α", "Ω"), ("α", "ω"), ("А", "я"))}
_SAME_LETTER = {0x2206: 0x0394, 0x2126: 0x03A9, 0x00B5: 0x03BC}
"""Names that Adobe's list gives to signs that look like Greek letters, and the letters."""


class _Glyph(NamedTuple):
    code: int
    face: str
    drawn: int  # the character that draws it: TeX's faces keep letters under other characters


class GlyphSource(Source):
    """The source `glyphs`; the same options give the same rows in the same order."""

    def __init__(self, options: GlyphOptions | None = None) -> None:
        self.options = options or GlyphOptions()
        chosen = self.options.faces
        self.faces = PRESETS[chosen] if isinstance(chosen, str) else chosen
        glyphs = [glyph for face in self.faces for glyph in _glyphs(face, self.options.characters)]
        # The limit draws whole characters from all alphabets; their order does not depend on the drawing.
        order = {face: number for number, face in enumerate(self.faces)}
        rank = {code: seed_of(self.options.seed, "glyphs", code) for code in {g.code for g in glyphs}}
        drawn = sorted(glyphs, key=lambda g: (rank[g.code], g.code, order[g.face]))[: self.options.limit]
        self.glyphs = sorted(drawn, key=lambda g: (g.code, order[g.face]))

    def __len__(self) -> int:
        return len(self.glyphs)

    def describe(self) -> dict[str, Any]:
        files = {face: sha256(_folder().joinpath(f"{face}.ttf").read_bytes()) for face in self.faces}
        glyphs = [[*glyph, self._groups[glyph.code]] for glyph in self.glyphs]
        return {
            "name": "glyphs",
            "fingerprint": digest([files, glyphs, CANVAS, _LARGEST, _SMALLEST, _SIZE]),
            "licence": "Bitstream Vera / DejaVu, STIX and BaKoMa font licences, as shipped by matplotlib",
        }

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        labels = {face: number for number, face in enumerate(self.faces)}
        for glyph in self.glyphs[start:stop]:
            yield Record(
                id=f"{glyph.code:05x}-{glyph.face}",
                key=f"{glyph.face}.ttf U+{glyph.code:04X}",
                image=render(glyph.face, chr(glyph.drawn)),
                caption=f"{unicodedata.name(chr(glyph.code)).lower()}, {FACES[glyph.face]}",
                label=labels[glyph.face],
                group=f"U+{self._groups[glyph.code]:04X}",
            )

    @cached_property
    def _groups(self) -> dict[int, int]:
        """The smallest character of each one's group: of those that look alike in one of the faces."""
        from scipy.cluster.hierarchy import DisjointSet

        groups = DisjointSet({glyph.code for glyph in self.glyphs})
        first: dict[str, int] = {}
        for glyph in self.glyphs:
            pixels = sha256(render(glyph.face, chr(glyph.drawn)).tobytes())
            groups.merge(glyph.code, first.setdefault(pixels, glyph.code))
        return {code: min(group) for group in groups.subsets() for code in group}


def render(face: str, character: str) -> Image.Image:
    """One character, L, `CANVAS` pixels square, dark on light, its ink in the middle."""
    # Enlarged or shrunk to fit, but a small letter stays smaller than its capital: no more than needed.
    size = _SIZE
    for more in (2, 1, 0):  # twice, since hinting moves outlines a little when the size changes
        mask = _font(face, size).getmask(character, mode="L")
        box, ink = mask.getbbox(), Image.new("L", (1, 1), 0)
        if box is not None:
            ink = Image.frombytes("L", mask.size, bytes(mask)).crop(box)
        extent = max(ink.size)
        if more and extent > _LARGEST:
            size *= (_LARGEST - 0.5) / extent
        elif more and extent < _SMALLEST - 1:
            size *= _SMALLEST / extent
        else:
            break
    canvas = Image.new("L", (CANVAS, CANVAS), 255)
    canvas.paste(0, ((CANVAS - ink.width) // 2, (CANVAS - ink.height) // 2), ink)
    return canvas


def _folder() -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf"


@lru_cache(maxsize=512)
def _font(face: str, size: float) -> ImageFont.FreeTypeFont:
    # Basic layout: Raqm, where Pillow has it, would draw other pixels on other machines.
    return ImageFont.truetype(_folder() / f"{face}.ttf", size, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=64)
def _glyphs(face: str, characters: str) -> list[_Glyph]:
    from fontTools.agl import toUnicode
    from fontTools.ttLib import TTFont

    path = _folder() / f"{face}.ttf"
    if not path.exists():
        raise DataError(f"matplotlib has no type face {path}", "install matplotlib 3.9 or newer")
    logging.getLogger("fontTools.ttLib.tables._h_e_a_d").setLevel(logging.ERROR)  # dates before 1970
    glyphs: dict[int, _Glyph] = {}
    with TTFont(path, lazy=True) as font:
        places = font["loca"]
        for drawn, name in sorted(font.getBestCmap().items()):
            number = font.getGlyphID(name)
            # TeX's faces use their character table as an encoding: there, a glyph's name tells what it is.
            text = toUnicode(name) if face.startswith("cm") else chr(drawn)
            if name == ".notdef" or places[number] == places[number + 1] or len(text) != 1:
                continue
            code = _SAME_LETTER.get(ord(text), ord(text)) if face.startswith("cm") else drawn
            if _is_among(chr(code), characters):
                glyphs.setdefault(code, _Glyph(code, face, drawn))
    return list(glyphs.values())


def _is_among(character: str, characters: str) -> bool:
    if characters == "all":
        return bool(unicodedata.name(character, "")) and unicodedata.category(character)[0] in "LNPS"
    if character in "0123456789":
        return True
    if unicodedata.category(character) not in ("Lu", "Ll"):
        return False
    if ranges := _RANGES.get(characters):
        return any(first <= character <= last for first, last in ranges)
    return unicodedata.name(character, "").startswith(("LATIN ", "GREEK ", "CYRILLIC "))
