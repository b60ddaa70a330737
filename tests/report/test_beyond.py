"""What a comparison measured beyond its table, as the page shows it; and files that lack it."""

import re
from typing import Any

import pytest

from atoll.base.errors import DataError
from atoll.report.page import write_report
from report.campaigns import PROMPTS, Builder, table
from report.pages import Page
from report.test_page import summary


def cells(page: Page) -> str:
    """The text of the page without blanks: cells of a table have none between them."""
    return "".join(page.text().split())


def chart(page: Page, words: str) -> str:
    pattern = rf'<svg class="chart"[^>]*aria-label="{words}[^"]*".*?</svg>'
    (drawn,) = re.findall(pattern, page.html, re.DOTALL)
    return str(drawn)


def dots(drawn: str, style: str) -> list[tuple[float, float]]:
    (group,) = re.findall(rf'<g class="{style}">.*?</g>', drawn, re.DOTALL)
    return [(float(x), float(y)) for x, y in re.findall(r'cx="([^"]+)" cy="([^"]+)"', group)]


def test_a_file_of_an_earlier_version_shows_what_there_is(whole: Builder, page: Page):
    assert page.with_class("beyond") == [] and "precision" not in page.text().lower()
    assert summary(whole)["compared"] == {}


def test_the_page_holds_all_of_it_and_is_well_formed(swept: Builder):
    page = Page.of(swept)
    assert page.wrong == page.outside() == []
    for title in ("Other guidance", "Distance by guidance", "On the way", "The same noise"):
        assert title in page.texts["h3"]
    assert all(a["alt"].strip() for a in page.all("img"))
    assert page.html.count("0.62") >= 6 and page.html.count("0.38") >= 6  # precision and recall of each
    assert "0.75" in page.text() and "0.88" in page.text()  # those of real training pictures
    assert "as its 3 nearest real ones are" in page.text()
    tables = summary(swept)["compared"]
    best = [(row["model"], row["guidance"], row["ratio"]) for row in tables["best"]]
    assert best == [("monolith", 3.0, None), ("once", 1.0, 0.842)]
    assert tables["reach"][0]["of_monolith"] == 0.9375


def test_guidance_is_drawn_and_each_best_told_with_its_ratio_and_the_edge(swept: Builder):
    page = Page.of(swept)
    drawn = chart(page, "Distance over the guidance scale: Monolith, once")
    mono, once = dots(drawn, "monolith"), dots(drawn, "selected")
    assert [x for x, _ in mono] == [x for x, _ in once] == sorted(x for x, _ in mono)
    assert once[0][1] > once[2][1] > once[1][1] > mono[2][1] > mono[1][1] > mono[0][1]  # y grows down
    assert "Monolith3*19.00–0.50–" in cells(page) and "once1*16.000.84×0.50–" in cells(page)
    assert "The last scale that was tried" in page.text()
    assert "The last scale that was tried" not in Page.of(swept.beyond(best=None)).text()


def test_the_ensembles_line_begins_where_that_of_shared_pretraining_ends(swept: Builder):
    page = Page.of(swept)
    drawn = chart(page, "Distance over training FLOPs: Shared pretraining, Monolith, once")
    shared, mono, once = (dots(drawn, style) for style in ("pretrain", "monolith", "selected"))
    assert len(shared) == len(mono) == 2 and len(once) == 3 and once[0] == shared[-1]
    assert mono[-1][0] == once[-1][0] and mono[-1][1] < once[-1][1]
    assert float(re.findall(r'class="guide" d="M[^ ]+ ([^H]+)H', drawn)[0]) == mono[-1][1]
    assert "once938GFLOPs93.8%" in cells(page)
    assert "the whole router and the whole shared pretraining are counted" in page.text()


@pytest.mark.parametrize(
    ("row", "words"),
    [((5e11, 0.5, "at the first point"), "at most 50.0%"), ((None, None, "never"), "not reached")],
)
def test_when_it_is_as_good_is_told_as_it_is(swept: Builder, row: tuple[Any, ...], words: str):
    reach = table("model target train_flops of_monolith how", [("once", 20.0, *row)])
    assert words in Page.of(swept.beyond(reach=reach)).text()


def test_without_a_monolith_the_curve_is_over_flops(swept: Builder):
    rows = [("once", s, f, None, d, None, None) for s, f, d in ((0.5, 1e12, 9.0), (1.0, 2e12, 4.0))]
    curve = table("model share train_flops of_monolith distance precision recall", rows)
    page = Page.of(swept.beyond(curve=curve, reach=None, pairs=None, guidance=None, best=None))
    assert len(dots(chart(page, "Distance over training FLOPs: once"), "selected")) == 2
    assert "The dashed line is the finished monolith" not in page.text()
    assert "the whole router is counted" in page.text()


def test_pairs_of_the_default_strategy_are_shown_with_their_numbers(swept: Builder):
    page, without = Page.of(swept), Page.of(swept.beyond(pairs=None))
    assert len(page.pictures()) == len(without.pictures()) + 2 * 2
    assert [a["alt"] for a in page.all("img")].count(f"Monolith: {PROMPTS[0]}") == 1
    row = "oncepixels0.810.80to0.820.320.31to0.33−0.14−0.15to−0.131.896%"
    assert row in cells(page)
    assert "Left the monolith, right once, from the same noise." in page.text()
    swept.beyond().store.delete("reports/compare/monolith/00.png")
    alts = [a["alt"] for a in Page.of(swept).all("img")]
    assert len([alt for alt in alts if alt.startswith("Monolith: ")]) == 1


def test_hostile_names_are_text(swept: Builder):
    columns = "strategy space partner pairs mean deviation low high effect higher"
    pairs = table(columns, [("<b>x", "pixels", "same noise", 2, *[None] * 6)])
    page = Page.of(swept.beyond(pairs=pairs))
    assert "<b>x" not in page.html and "<b>xpixels–––––" in cells(page) and page.wrong == []


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("guidance", table("model guidance", [("once", "much")]), "guidance.*valid number"),
        ("curve", table("model", [("once",)]), "share"),
    ],
)
def test_tables_of_another_form_are_one_line(swept: Builder, name: str, rows: dict[str, Any], words: str):
    with pytest.raises(DataError, match=words) as error:
        write_report(swept.beyond(**{name: rows}).store)
    assert "\n" not in str(error.value)
