"""What a comparison measured beyond its table, as the page draws it; and tables that lack something."""

import re
from typing import Any

import pytest

from report.campaigns import Builder, table
from report.pages import Page


def dots(page: Page, words: str, style: str) -> list[tuple[float, float]]:
    """Places of the dots of a line in the chart of this label."""
    (drawn,) = re.findall(rf'<svg class="chart"[^>]*aria-label="{words}".*?</svg>', page.html, re.DOTALL)
    (group,) = re.findall(rf'<g class="{style}">.*?</g>', drawn, re.DOTALL)
    return [(float(x), float(y)) for x, y in re.findall(r'cx="([^"]+)" cy="([^"]+)"', group)]


def test_lines_lie_as_their_numbers(swept: Builder):
    page, label = Page.of(swept), "Distance by guidance: Monolith, once"
    mono, once = (dots(page, label, style) for style in ("monolith", "selected"))
    assert [x for x, _ in mono] == [x for x, _ in once] == sorted(x for x, _ in mono)
    assert once[0][1] > once[2][1] > once[1][1] > mono[2][1] > mono[1][1] > mono[0][1]  # y grows down
    label = "Distance by training FLOPs: Shared pretraining, Monolith, once"
    shared, mono, once = (dots(page, label, style) for style in ("pretrain", "monolith", "selected"))
    # The ensemble's line begins where that of shared pretraining ends.
    assert len(shared) == len(mono) == 2 and len(once) == 3 and once[0] == shared[-1]
    assert mono[-1][0] == once[-1][0] and mono[-1][1] < once[-1][1]
    drawn = page.html[page.html.index(label) :]
    assert float(re.findall(r'class="guide" d="M[^ ]+ ([^H]+)H', drawn)[0]) == mono[-1][1]


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
    assert len(dots(page, "Distance by training FLOPs: once", "selected")) == 2
    assert "The dashed line is the finished monolith" not in page.text()
    assert "include the whole router" in page.text()


def test_a_pair_without_both_pictures_is_left_out_and_names_are_text(swept: Builder):
    swept.store.delete("reports/compare/monolith/00.png")
    alts = [a["alt"] for a in Page.of(swept).all("img")]
    assert len([alt for alt in alts if alt.startswith("Monolith: ")]) == 1
    columns = "strategy space partner pairs mean deviation low high effect higher"
    page = Page.of(swept.beyond(pairs=table(columns, [("<b>x", "pixels", "same noise", 2, *[None] * 6)])))
    assert "<b>x" not in page.html and "<b>xpixels–––––" in "".join(page.text().split()) and not page.wrong
