"""The section `Why`: what it says, and that it says what the tables hold."""

import re
from pathlib import Path

import pytest

from atoll.report import figures
from atoll.report.campaign import open_campaign
from atoll.report.figures import Heat
from atoll.report.page import write_report
from atoll.report.why import section
from report.campaigns import Builder
from report.pages import Page


def page(builder: Builder) -> Page:
    return Page(Path(write_report(builder.store)).read_text())


def findings(builder: Builder) -> str:
    found = section(open_campaign(builder.store))
    assert found is not None
    return " ".join(found["findings"])


def table(builder: Builder, name: str, change: dict[str, object], **where: object) -> None:
    """Change a column in the rows of a table that have these values."""
    found = builder.store.get_json("reports/diagnostics.json")
    columns = found["tables"][name]["columns"]
    changed = 0
    for row in found["tables"][name]["rows"]:
        if all(row[columns.index(key)] == value for key, value in where.items()):
            changed += 1
            for key, value in change.items():
                row[columns.index(key)] = value
    assert changed
    builder.store.put_json("reports/diagnostics.json", found)


def test_before_the_diagnosis_it_says_what_makes_it(builder: Builder):
    found = page(builder.campaign().partition().train().compare())
    assert "atoll diagnose CAMPAIGN" in found.texts["code"]
    assert found.with_class("heat") == []


def test_findings_say_what_the_tables_hold(builder: Builder):
    said = findings(builder.whole())
    assert "4 of 4 are the best on their own cluster." in said
    assert "the first choice beats it at t = 0.25, 0.75, 1 and loses nowhere" in said
    assert "On no cluster is the monolith surely better" in said
    assert "At t = 1 the router is right in 40.0% of the cases" in said
    assert "its cross-entropy, 1.50, is worse than the cluster sizes’ (1.30)" in said
    assert "It is too sure: dividing its logits by 2.0 would suit best." in said
    assert "costs 50.0% of error" in said
    assert "6.0% of the samples are nearer to a training picture" in said and "by chance: up to 2%" in said
    for finding in section(open_campaign(builder.store))["findings"]:  # type: ignore[index]
        assert finding in page(builder).text()


def test_findings_follow_the_tables(builder: Builder):
    builder.whole()
    table(builder, "experts", {"error": 9.0}, t="mean", cluster=2, expert=2)
    table(builder, "differences", {"difference": 0.5}, gap="selected-monolith", t=0.25, cluster="all")
    table(builder, "differences", {"difference": 0.001}, gap="selected-monolith", t=0.75, cluster="all")
    table(builder, "differences", {"difference": 0.5}, gap="selected-monolith", t="mean", cluster=3)
    table(builder, "differences", {"difference": 0.01}, gap="selected-own", t="mean", cluster="all")
    table(builder, "router", {"nll": 1.0, "confidence": 0.1, "ece": 0.04}, t=1.0)
    said = findings(builder)
    assert "3 of 4 are the best on their own cluster; on cluster 2 expert 1 is better." in said
    assert "the first choice beats it at t = 1 and loses at t = 0.25" in said
    assert "better than the first choice on cluster 3, averaged over time (700 training rows)" in said
    assert "is better than the cluster sizes’" in said and "It is" not in said
    assert "Told the right cluster, the ensemble would do no better" in said


def test_a_router_that_is_not_sure_enough(builder: Builder):
    builder.whole()
    table(builder, "router", {"confidence": 0.1}, t=1.0)
    assert "It is not sure enough" in findings(builder)


def test_heat_maps_hold_every_expert_and_cluster(builder: Builder):
    found = page(builder.whole())
    titles = [text for text in found.texts["title"] if "on cluster" in text]
    for expert in range(4):
        for cluster in range(4):
            value = 1.0 + abs(expert - cluster)
            text = f"expert {expert} on cluster {cluster}: error {value:.2f}, {value:.2f}× that of its own"
            assert sum(title.startswith(text) for title in titles) == 4  # once large, at three times small
    assert sum("monolith on cluster 3: error 2.00" in title for title in titles) == 4
    assert len(found.with_class("frame")) == (1 + 3 + 1) * 4  # the map of missing experts too
    assert any("without expert 1, cluster 1: +20% error" in text for text in found.texts["title"])
    assert any("without expert 1, cluster 2: -4% error" in text for text in found.texts["title"])


def test_without_a_monolith_errors_are_plain(builder: Builder):
    builder.whole().diagnose(monolith=False)
    found = page(builder)
    assert "monolith" not in findings(builder)
    assert "Error of the ensemble’s ways to answer." in found.text()
    assert "First choice and monolith by cluster" not in found.text()
    assert not any("monolith on cluster" in text for text in found.texts["title"])


def test_missing_experts_and_leaks_are_told(builder: Builder):
    builder.whole().diagnose(missing=[1, 3], copies={"leaked": 12})
    text = page(builder).text()
    assert "Experts 1, 3 were missing and are left out" in text
    assert "12 held-out pictures are training pictures too" in text


def test_two_splits_are_two_lines(builder: Builder):
    found = page(builder.whole().diagnose(splits=("heldout", "train")))
    assert "training rows" in found.text()
    assert "nll on training rows" in found.texts["title"]
    assert len([t for t in found.texts["title"] if t == "nll on held-out rows"]) == 1


def test_a_diagnosis_without_samples_has_no_tables_of_them(builder: Builder):
    builder.whole()
    found = builder.store.get_json("reports/diagnostics.json")
    for name in ("usage", "switches", "landing", "stability", "lipschitz", "nearest", "suspicious"):
        del found["tables"][name]
    found |= {"pictures": [], "copies": None, "strategies": []}
    builder.store.put_json("reports/diagnostics.json", found)
    text = page(builder).text()
    assert "Who is used" not in text and "Copies of training pictures" not in text
    assert "Where samples end" not in text and "How steady paths are" not in text
    assert "Who knows what" in text


def test_ends_and_steadiness_of_paths_are_told(builder: Builder):
    found = page(builder.whole())
    text = found.text()
    assert "under once: 0.500, and 0.800 from the others’; top-1: 0.500" in text
    assert "held-out pictures, from their own cluster’s: 0.400, and 0.900 from the others’" in text
    assert "1.50 ± 0.10" in text and "0.0500 ± 0.0020" in text
    assert "Change of the foreseen picture" in text
    table(builder, "landing", {"landed": None, "served": None, "others": None}, cluster=1)
    table(builder, "landing", {"own": None, "heldout_others": None})
    table(builder, "stability", {"sensitivity_se": None, "refinement_se": None})
    text = page(builder).text()
    assert "Where samples end" in text and "held-out pictures, from" not in text and "1.50 ±" not in text


def test_clusters_without_rows_are_empty_cells(builder: Builder):
    builder.whole()
    table(builder, "experts", {"error": None}, cluster=1)
    table(builder, "missing", {"loss": None}, cluster=1)
    table(builder, "errors", {"error": None, "se": None}, cluster=1)
    found = page(builder)
    assert any(text == "expert 0 on cluster 1: error –, no rows" for text in found.texts["title"])
    assert "3 of 3 are the best" in findings(builder)


def test_pairs_show_both_pictures_and_the_caption(builder: Builder):
    found = page(builder.whole())
    alts = [a["alt"] for a in found.all("img")]
    assert alts.count("Sample, left") == 3, "two suspicious ones, one of a cluster"
    assert "Nearest training picture: digit two, sans" in alts
    assert "Each expert’s nearest sample" in found.text()
    found = page(builder.diagnose(closest=[]))
    assert "Each expert’s nearest sample" not in found.text(), "earlier files have none"


# Heat maps.


@pytest.mark.parametrize("count", [1, 4, 16])
def test_cells_lie_side_by_side_within_the_map(count: int):
    names = [(f"Expert {n}", f"e{n}") for n in range(count)]
    cells = [[Heat(0.5, "1.50×", f"{i} {j}", framed=i == j) for j in range(count)] for i in range(count)]
    for small in (False, True):
        drawn = Page(figures.heat_map(names, names, cells, 'about "it"', small))
        assert drawn.wrong == []
        (svg,) = drawn.all("svg")
        assert svg["aria-label"] == 'about "it"'
        width, height = (float(v) for v in svg["viewbox"].split()[2:])
        boxes = [a for a in drawn.all("rect") if "cell" in a["class"]]
        assert len(boxes) == count**2 and len(drawn.with_class("frame")) == count
        corners = {(float(a["x"]), float(a["y"])) for a in boxes}
        assert len(corners) == count**2
        for a in boxes:
            assert float(a["x"]) + float(a["width"]) <= width
            assert float(a["y"]) + float(a["height"]) <= height
        texts = [text for text in drawn.texts.get("text", []) if "×" in text]
        assert len(texts) == (0 if small else count**2)


def test_the_colour_of_a_cell_is_its_strength():
    cells = [[Heat(s, "", "<b>") for s in (-2.0, -0.5, 0.0, 0.5, 1.0, None)]]
    drawn = Page(figures.heat_map([("a", "e0")], [("b", "e0")] * 6, cells, "about"))
    boxes = [a for a in drawn.all("rect") if "cell" in a["class"]]
    assert [a["class"].split()[1] for a in boxes] == ["good", "good", "good", "bad", "bad", "empty"]
    opacity = [float(a["fill-opacity"]) for a in boxes]
    assert opacity[0] > opacity[1] > opacity[2] < opacity[3] < opacity[4] <= 0.8
    assert "<b>" in drawn.texts["title"] and not re.search("<b>", str(drawn.html).replace("&lt;b&gt;", ""))
