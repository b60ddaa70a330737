"""The section `Why`: what it says, and that it says what the tables hold."""

import pytest

from atoll.base.errors import DataError
from atoll.report.page import write_report
from atoll.report.why import Cell
from report.campaigns import Builder
from report.pages import Page


def findings(page: Page) -> str:
    return " ".join(page.texts["li"])


def tooltips(page: Page) -> list[str]:
    return [attributes["title"] for attributes in page.with_class("cell")]


def test_findings_say_what_the_tables_hold(page: Page):
    words = findings(page)
    assert "4 of 4 are the best on their own cluster." in words
    assert "the first choice beats it at t = 0.25, 0.75, 1 and loses nowhere" in words
    assert "On no cluster is the monolith surely better" in words
    assert "At t = 1 the router is right in 40.0% of the cases" in words
    assert "its cross-entropy, 1.50, is worse than the cluster sizes’ (1.30)" in words
    assert "It is too sure: dividing its logits by 2.0 would suit best." in words
    assert "costs 50.0% of error" in words
    assert "6.0% of the samples are nearer to a training picture" in words and "by chance: up to 2%" in words


def test_findings_follow_the_tables(whole: Builder):
    whole.change("experts", {"error": 9.0}, t="mean", cluster=2, expert=2)
    whole.change("differences", {"difference": 0.5}, gap="selected-monolith", t=0.25, cluster="all")
    whole.change("differences", {"difference": 0.001}, gap="selected-monolith", t=0.75, cluster="all")
    for cluster in (1, 3):
        whole.change("differences", {"difference": 0.5}, gap="selected-monolith", t="mean", cluster=cluster)
    whole.change("differences", {"difference": 0.01}, gap="selected-own", t="mean", cluster="all")
    whole.change("router", {"nll": 1.0, "confidence": 0.1, "ece": 0.04}, t=1.0)
    words = findings(Page.of(whole))
    assert "3 of 4 are the best on their own cluster; on cluster 2 expert 1 is better." in words
    assert "the first choice beats it at t = 1 and loses at t = 0.25" in words
    assert (
        "better than the first choice on clusters 1 and 3, averaged over time (900, 700 training rows)"
        in words
    )
    assert "is better than the cluster sizes’" in words and "It is" not in words
    assert "Told the right cluster, the ensemble would do no better" in words
    whole.change("router", {"nll": None, "ece": 0.5}, t=1.0)
    words = findings(Page.of(whole))
    assert "It is not sure enough" in words and "cross-entropy" not in words


def test_heat_maps_hold_every_expert_and_cluster(page: Page):
    titles = tooltips(page)
    for expert in range(4):
        for cluster in range(4):
            value = 1.0 + abs(expert - cluster)
            text = f"expert {expert} on cluster {cluster}: error {value:.2f}, {value:.2f}× that of its own"
            assert sum(title.startswith(text) for title in titles) == 4  # once large, at three times small
    assert sum("monolith on cluster 3: error 2.00" in title for title in titles) == 4
    assert len(page.with_class("framed")) == (1 + 3 + 1) * 4  # the map of missing experts too
    assert "without expert 1, cluster 1: +20% error" in titles
    assert "without expert 1, cluster 2: -4% error" in titles
    assert page.texts["td"].count("2.00×") == 4 + 6, "the monolith's and the neighbours', in the large map"


def test_the_colour_of_a_cell_is_its_strength():
    cells = [Cell(strength, "", "") for strength in (-2.0, -0.5, 0.0, 0.5, 1.0, None)]
    assert [cell.kind for cell in cells] == ["good", "good", "good", "bad", "bad", "empty"]
    assert [cell.opacity for cell in cells] == [60, 33, 6, 33, 60, 6]


def test_without_a_monolith_errors_are_plain(whole: Builder):
    page = Page.of(whole.diagnose(monolith=False))
    assert "monolith" not in findings(page)
    assert "Error of the ensemble’s ways to answer." in page.text()
    assert "First choice and monolith by cluster" not in page.text()
    assert not any("monolith" in text for text in tooltips(page))


def test_missing_experts_leaks_and_two_splits_are_told(whole: Builder):
    page = Page.of(whole.diagnose(splits=("heldout", "train"), missing=[1, 3], copies={"leaked": 12}))
    assert "Experts 1, 3 were missing and are left out" in page.text()
    assert "12 held-out pictures are training pictures too" in page.text()
    for split in ("held-out rows", "training rows"):
        assert page.texts["title"].count(split) == 2, "a line of the cross-entropy and of the accuracy"


def test_what_happens_while_sampling_is_told(whole: Builder, page: Page):
    text = page.text()
    assert "top-1: 12.5% of the steps, 40.0% of the samples at least once" in text
    assert "under once: 0.500, and 0.800 from the others’; top-1: 0.500" in text
    assert "held-out pictures, from their own cluster’s: 0.400, and 0.900 from the others’" in text
    assert "1.50 ± 0.10" in text and "0.0500 ± 0.0020" in text and "Change of the foreseen picture" in text
    whole.change("landing", {"landed": None, "served": None, "others": None}, cluster=1)
    whole.change("landing", {"own": None, "heldout_others": None})
    whole.change("stability", {"sensitivity_se": None, "refinement_se": None})
    text = Page.of(whole).text()
    assert "Where samples end" in text and "held-out pictures, from" not in text and "1.50 ±" not in text
    content = whole.store.get_json("reports/diagnostics.json")
    for name in ("usage", "switches", "landing", "stability", "lipschitz", "nearest", "suspicious"):
        del content["tables"][name]
    whole.store.put_json("reports/diagnostics.json", content | {"pictures": [], "copies": None})
    text = Page.of(whole).text()
    for title in ("Who is used", "Copies of training pictures", "Where samples end", "How steady paths are"):
        assert title not in text
    assert "Who knows what" in text


def test_clusters_without_rows_are_empty_cells(whole: Builder):
    for name, column in (("experts", "error"), ("missing", "loss"), ("errors", "error")):
        whole.change(name, {column: None}, cluster=1)
    page = Page.of(whole)
    assert "expert 0 on cluster 1: error –, no rows" in tooltips(page)
    assert "3 of 3 are the best" in findings(page)


def test_pairs_show_both_pictures_and_the_caption(whole: Builder, page: Page):
    alts = [a["alt"] for a in page.all("img")]
    assert alts.count("Sample, left") == 3, "two suspicious ones, one of a cluster"
    assert "Nearest training picture: digit two, sans" in alts
    assert "Each expert’s nearest sample" in page.text()
    assert "Each expert’s nearest sample" not in Page.of(whole.diagnose(closest=[])).text()


def test_tables_of_another_form_are_one_line(whole: Builder):
    whole.change("router", {"nll": None})
    assert "Cross-entropy by time" not in Page.of(whole).text(), "nothing is not wrong"
    content = whole.store.get_json("reports/diagnostics.json")
    whole.change("router", {"ece": "much"})
    with pytest.raises(DataError, match=r"ece.*valid number"):
        write_report(whole.store)
    columns = content["tables"]["router"]["columns"]
    columns[columns.index("nll")] = "something else"
    whole.store.put_json("reports/diagnostics.json", content)
    with pytest.raises(DataError, match="nll") as error:
        write_report(whole.store)
    assert "\n" not in str(error.value)
