import string

import pytest
from PIL import Image, ImageOps

from atoll.base.errors import ConfigError
from atoll.data.settings import GlyphOptions
from atoll.data.sources.glyphs import CANVAS, GlyphSource
from atoll.data.sources.record import Record


def rows(source: GlyphSource, start: int = 0, stop: int = 10**6) -> list[Record]:
    found = list(source.records(start, stop))
    assert all(isinstance(row, Record) for row in found)
    return found  # type: ignore[return-value]


def test_captions_name_character_and_face() -> None:
    faces = ["DejaVuSerif-Bold", "DejaVuSansMono-Oblique"]
    source = GlyphSource(GlyphOptions(faces=faces, characters="basic"))
    captions = {row.id: row.caption for row in rows(source)}
    assert captions["003b1-DejaVuSerif-Bold"] == "greek small letter alpha, serif bold"
    assert captions["00037-DejaVuSansMono-Oblique"] == "digit seven, mono oblique"
    assert captions["0042f-DejaVuSerif-Bold"] == "cyrillic capital letter ya, serif bold"
    assert len(set(captions.values())) == len(captions) == len(source)


def test_tex_faces_are_named_by_their_glyphs_not_by_their_encoding() -> None:
    options = GlyphOptions(faces=["cmmi10", "cmr10"], characters="all")
    captions = {row.caption for row in rows(GlyphSource(options))}
    assert "greek small letter alpha, computer modern math italic" in captions
    assert "greek capital letter delta, computer modern" in captions
    assert "registered sign, computer modern math italic" not in captions


def test_pictures_fit_and_lie_in_the_middle() -> None:
    for row in rows(GlyphSource(GlyphOptions(faces="all", characters="all", limit=600, seed=3))):
        box = ImageOps.invert(row.image).getbbox()  # type: ignore[arg-type]
        assert box is not None, row.caption
        left, top, right, bottom = box
        assert max(right - left, bottom - top) <= CANVAS - 8, row.caption
        assert max(right - left, bottom - top) >= 22, row.caption
        assert abs(left + right - CANVAS) <= 1, row.caption
        assert abs(top + bottom - CANVAS) <= 1, row.caption


def test_the_same_options_give_the_same_rows() -> None:
    first, second = (GlyphSource(GlyphOptions(limit=50, seed=1)) for _ in range(2))
    assert first.describe() == second.describe()
    assert [row.image.tobytes() for row in rows(first)] == [row.image.tobytes() for row in rows(second)]  # type: ignore[union-attr]
    assert first.describe() != GlyphSource(GlyphOptions(limit=50, seed=2)).describe()
    assert [row.id for row in rows(first, 10, 20)] == [row.id for row in rows(first)][10:20]


def test_no_picture_is_in_two_groups() -> None:
    """Not even as small as the quickstart ingests them: those that are equal are so at this size too."""
    found = rows(GlyphSource(GlyphOptions(characters="basic", faces="dejavu")))
    pictures: dict[bytes, set[str]] = {}
    for row in found:
        assert row.image is not None and row.group is not None
        seen = row.image.resize((16, 16), Image.Resampling.LANCZOS)
        pictures.setdefault(seen.tobytes(), set()).add(row.group)
    assert {len(groups) for groups in pictures.values()} == {1}
    group = {row.caption: row.group for row in found}
    one = {group[f"{script} capital letter a, sans"] for script in ("latin", "cyrillic")}
    assert one == {group["greek capital letter alpha, sans"]} == {"U+0041"}
    assert group["latin capital letter b, sans"] != "U+0041"


def test_latin_is_the_ascii_letters_and_digits_in_every_face() -> None:
    found = rows(GlyphSource(GlyphOptions(characters="latin", faces="dejavu")))
    drawn = [chr(int(row.id.partition("-")[0], 16)) for row in found]
    assert sorted(drawn) == sorted(12 * (string.ascii_letters + string.digits))


def test_a_limit_is_spread_over_alphabets_and_faces() -> None:
    found = rows(GlyphSource(GlyphOptions(limit=400)))
    assert len(found) == 400
    assert {row.caption.split()[0] for row in found} >= {"latin", "greek", "cyrillic"}
    assert {row.label for row in found} == set(range(8))
    assert len({row.group for row in found}) < 80


def test_unknown_faces_are_answered_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="did you mean 'dejavu'"):
        GlyphOptions.parse({"faces": "dejavuu"}, "campaign.yaml")
    with pytest.raises(ConfigError, match="LastResort"):
        GlyphOptions.parse({"faces": ["LastResortHE-Regular"]}, "campaign.yaml")
    with pytest.raises(ConfigError, match="at least one"):
        GlyphOptions.parse({"faces": []}, "campaign.yaml")
