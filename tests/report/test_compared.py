"""What a comparison measured beyond its table, as the page shows it; and files that lack it."""

import re
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import DataError
from atoll.report.campaign import open_campaign
from atoll.report.compared import section
from atoll.report.page import write_report
from atoll.report.summary import summary
from report.campaigns import PROMPTS, Builder
from report.pages import Page


def page(builder: Builder) -> Page:
    return Page(Path(write_report(builder.store)).read_text())


def whole(builder: Builder, **change: Any) -> Builder:
    return builder.whole().compare(PROMPTS[:1] + PROMPTS[2:3]).beyond(**change)


def cells(found: Page) -> str:
    """The text of the page without blanks: cells of a table have none between them."""
    return "".join(found.text().split())


def test_a_file_of_an_earlier_version_shows_what_there_is(builder: Builder):
    found = page(builder.whole())
    assert section(open_campaign(builder.store)) is None
    assert found.with_class("beyond") == [] and "precision" not in found.text().lower()


def test_the_page_holds_all_of_it_and_is_well_formed(builder: Builder):
    found = page(whole(builder))
    assert found.wrong == found.outside() == []
    for title in ("Other guidance", "Distance by guidance", "On the way", "The same noise"):
        assert title in found.texts["h3"] or any(title in text for text in found.texts["h3"])
    assert all(a["alt"].strip() for a in found.all("img"))
    assert found.html.count("0.62") >= 6 and found.html.count("0.38") >= 6  # precision and recall of each
    assert "0.75" in found.text() and "0.88" in found.text()  # those of real training pictures
    assert "as its 3 nearest real ones are" in found.text()


def test_each_best_guidance_is_told_with_its_ratio_and_the_edge(builder: Builder):
    found = page(whole(builder))
    assert "Monolith3*19.00–0.50–" in cells(found) and "once1*16.000.84×0.50–" in cells(found)
    text = found.text()
    assert "The last scale that was tried" in text and "flatters all of them alike" in text
    rows = section(open_campaign(whole(builder, best=None).store))
    assert rows is not None and rows["guidance"]["best"] == [] and rows["guidance"]["edge"] is False


def chart(found: Page, words: str) -> str:
    (drawn,) = re.findall(
        rf'<svg class="chart"[^>]*aria-label="{words}[^"]*".*?</svg>', found.html, re.DOTALL
    )
    return str(drawn)


def dots(drawn: str, style: str) -> list[tuple[float, float]]:
    (group,) = re.findall(rf'<g class="{style}">.*?</g>', drawn, re.DOTALL)
    return [(float(x), float(y)) for x, y in re.findall(r'cx="([^"]+)" cy="([^"]+)"', group)]


def test_the_guidance_chart_draws_lower_distances_lower(builder: Builder):
    drawn = chart(page(whole(builder)), "Distance over the guidance scale: Monolith, once")
    mono, once = dots(drawn, "monolith"), dots(drawn, "selected")
    assert [x for x, _ in mono] == [x for x, _ in once] == sorted(x for x, _ in mono)
    assert once[0][1] > once[2][1] > once[1][1] > mono[2][1] > mono[1][1] > mono[0][1]  # y grows down


def test_the_ensembles_line_begins_where_the_seeds_ends(builder: Builder):
    found = page(whole(builder))
    drawn = chart(found, "Distance over training FLOPs: Shared pretraining, Monolith, once")
    seed, mono, once = (dots(drawn, style) for style in ("pretrain", "monolith", "selected"))
    assert len(seed) == len(mono) == 2 and len(once) == 3 and once[0] == seed[-1]
    assert mono[-1][0] == once[-1][0] and mono[-1][1] < once[-1][1]
    guide = float(re.findall(r'class="guide" d="M[^ ]+ ([^H]+)H', drawn)[0])
    assert guide == mono[-1][1]
    assert "once938GFLOPs93.8%" in cells(found)
    assert "the whole router and the whole shared pretraining are counted" in found.text()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"train_flops": 5e11, "of_monolith": 0.5, "how": "at the first point"}, "at most 50.0%"),
        ({"train_flops": None, "of_monolith": None, "how": "never"}, "not reached"),
    ],
)
def test_when_it_is_as_good_is_told_as_it_is(builder: Builder, row: dict[str, Any], words: str):
    text = page(whole(builder, reach=[{"model": "once", "target": 20.0, **row}])).text()
    assert words in text


def test_without_a_monolith_the_curve_is_over_flops(builder: Builder):
    rows = [
        {"model": "once", "share": s, "train_flops": f, "of_monolith": None, "distance": d}
        | {"precision": None, "recall": None}
        for s, f, d in ((0.5, 1e12, 9.0), (1.0, 2e12, 4.0))
    ]
    found = page(whole(builder, curve=rows, reach=None, pairs=None, guidance=None, best=None))
    assert len(dots(chart(found, "Distance over training FLOPs: once"), "selected")) == 2
    assert (
        "The dashed line is the finished monolith" not in found.text()
        and "the whole router is counted" in found.text()
    )


def test_pairs_of_the_default_strategy_are_shown_with_their_numbers(builder: Builder):
    before = len(page(builder.whole().compare(PROMPTS[:2])).pictures())
    found = page(builder.beyond())
    assert len(found.pictures()) == before + 2 * 2
    assert [a["alt"] for a in found.all("img")].count(f"Monolith: {PROMPTS[0]}") == 1
    row = "oncepixels0.810.80to0.820.320.31to0.33−0.14−0.15to−0.131.896%"
    assert row in cells(found)
    assert "Left the monolith, right once, from the same noise." in found.text()
    builder.store.delete("reports/compare/monolith/00.png")
    assert len([a for a in page(builder).all("img") if a["alt"].startswith("Monolith: ")]) == 1


def test_the_summary_has_the_tables(builder: Builder):
    assert "compared" not in summary(open_campaign(builder.whole().store))
    made = summary(open_campaign(whole(builder).store))["compared"]
    assert [(row["model"], row["guidance"], row["ratio"]) for row in made["best"]] == [
        ("monolith", 3.0, None),
        ("once", 1.0, 0.842),
    ]
    assert made["reach"][0]["of_monolith"] == 0.9375


def test_hostile_names_are_text(builder: Builder):
    rows = [
        {"strategy": "<b>x", "space": "pixels", "partner": "same noise", "pairs": 2, "mean": None}
        | {"low": None, "high": None, "effect": None, "higher": None}
    ]
    found = page(whole(builder, pairs=rows))
    assert "<b>x" not in found.html and "<b>xpixels–––––" in cells(found) and found.wrong == []


@pytest.mark.parametrize(
    ("table", "rows", "words"),
    [
        ("guidance", [{"model": "once", "guidance": "much"}], "a table's guidance is no number"),
        ("curve", [{"model": "once"}], "share"),
    ],
)
def test_tables_of_another_form_are_one_line(
    builder: Builder, table: str, rows: list[dict[str, Any]], words: str
):
    with pytest.raises(DataError, match=words) as error:
        write_report(whole(builder, **{table: rows}).store)
    assert "\n" not in str(error.value)
