"""The section `Why` says what the tables hold; `records/finished.txt` has what it says of whole ones."""

import pytest

from atoll.base.errors import DataError
from atoll.report.page import write_report
from atoll.report.why import Cell
from report.campaigns import Builder
from report.pages import Page


def findings(page: Page) -> str:
    return " ".join(page.texts["li"])


def test_findings_follow_the_tables(whole: Builder):
    whole.change("experts", {"error": 9.0}, t="mean", cluster=2, expert=2)
    whole.change("differences", {"difference": 0.5}, gap="selected-monolith", t=0.25, cluster="all")
    whole.change("differences", {"difference": 0.001}, gap="selected-monolith", t=0.75, cluster="all")
    for cluster in (1, 3):
        whole.change("differences", {"difference": 0.5}, gap="selected-monolith", t="mean", cluster=cluster)
    whole.change("differences", {"difference": 0.01}, gap="selected-own", t="mean", cluster="all")
    whole.change("router", {"nll": 1.0, "confidence": 0.1, "ece": 0.04}, t=1.0)
    words = findings(Page.of(whole))
    assert "3 of 4 experts are best on their own cluster; on cluster 2 expert 1 is better." in words
    assert "the top-1 expert beats it at t = 1 and loses at t = 0.25" in words
    lost = "better than the top-1 expert on clusters 1 and 3, averaged over time (900, 700 training rows)"
    assert lost in words
    assert "is better than the cluster sizes’" in words and "It is" not in words
    assert "is not significantly better than the router’s top-1 expert" in words
    whole.change("router", {"nll": None, "ece": 0.5}, t=1.0)
    words = findings(Page.of(whole))
    assert "It is underconfident" in words and "cross-entropy" not in words


def test_the_colour_of_a_cell_is_its_strength():
    cells = [Cell(strength, "", "") for strength in (-2.0, -0.5, 0.0, 0.5, 1.0, None)]
    assert [cell.kind for cell in cells] == ["good", "good", "good", "bad", "bad", "empty"]
    assert [cell.opacity for cell in cells] == [60, 33, 6, 33, 60, 6]


def test_without_a_monolith_errors_are_plain(whole: Builder):
    page = Page.of(whole.diagnose(monolith=False, closest=[]))
    assert "monolith" not in findings(page)
    assert "Error of the ensemble’s predictions." in page.text()
    assert "Top-1 expert and monolith by cluster" not in page.text()
    assert not any("monolith" in attributes["title"] for attributes in page.with_class("cell"))
    assert "Each expert’s nearest sample" not in page.text()


def test_missing_experts_leaks_two_splits_and_what_is_not_known(whole: Builder):
    whole.diagnose(splits=("heldout", "train"), missing=[1, 3], copies={"leaked": 12})
    whole.change("landing", {"landed": None, "served": None, "others": None}, cluster=1)
    whole.change("landing", {"own": None, "heldout_others": None})
    whole.change("stability", {"sensitivity_se": None, "refinement_se": None})
    for name, column in (("experts", "error"), ("missing", "loss"), ("errors", "error")):
        whole.change(name, {column: None}, cluster=1)
    Page.of(whole).is_as_recorded("partly-known")


def test_a_diagnosis_without_samples_has_no_part_about_them(whole: Builder):
    content = whole.store.get_json("reports/diagnostics.json")
    for name in ("usage", "switches", "landing", "stability", "lipschitz", "nearest", "suspicious"):
        del content["tables"][name]
    whole.store.put_json("reports/diagnostics.json", content | {"pictures": [], "copies": None})
    text = Page.of(whole).text()
    for title in (
        "Expert usage",
        "Copies of training images",
        "Clusters of the samples",
        "Stability of paths",
    ):
        assert title not in text
    assert "Experts by cluster" in text


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
