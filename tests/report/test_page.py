"""The page as a whole: self-contained, well-formed, safe, and there at every stage of a campaign."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.base.errors import AtollError, DataError, PartitionError
from atoll.model.routing import Routing
from atoll.report.facts import clean
from atoll.report.page import write_report
from report.campaigns import DISTANCES, METRIC, PROMPTS, Builder
from report.pages import Page

SECTIONS = ["samples", "routing", "clusters", "learning", "strategies", "why", "flops", "provenance"]


def summary(builder: Builder) -> dict[str, Any]:
    write_report(builder.store)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    figures: dict[str, Any] = json.loads(builder.store.get("reports/summary.json"), parse_constant=refuse)
    return figures


def test_a_finished_campaign_is_one_page_without_references_to_the_outside(page: Page):
    assert page.outside() == [] and page.wrong == []
    assert {"script", "link", "iframe", "object", "base", "form"}.isdisjoint(tag for tag, _ in page.elements)
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert [a["href"][1:] for a in page.all("a")] == [a["id"] for a in page.all("section")] == SECTIONS


def test_references_to_the_outside_are_found():
    for html in (
        '<img src="https://example.org/a.png">',
        '<a href="http://example.org">x</a>',
        '<img src="a.png">',
        "<style>@import 'a.css'</style>",
        '<p style="background: url(a.png)">x</p>',
    ):
        assert Page(html).outside()
    assert Page("<p><b>x</p></b>").wrong


def test_every_picture_is_there_once_and_decodes_and_says_what_it_is(page: Page):
    pictures = page.pictures()
    shown, thumbnails, sheets = len(PROMPTS) * (len(DISTANCES) + 1), len(PROMPTS), 4
    pairs = 2 * 3  # two suspicious samples and one cluster's nearest, beside their training pictures
    assert len(pictures) == shown + thumbnails + sheets + pairs
    assert [p.size for p in pictures].count((16, 16)) == shown + thumbnails + pairs
    assert [(int(a["width"]), int(a["height"])) for a in page.all("img")] == [p.size for p in pictures]
    assert all(attributes["alt"].strip() for attributes in page.all("img"))
    drawn = [*page.all("svg"), *page.with_class("bar")]
    assert len(drawn) > 30 and all(a["role"] == "img" and a["aria-label"].strip() for a in drawn)
    assert len(page.all("html")) == len(page.all("h1")) == len(page.all("main")) == 1


def test_the_same_campaign_gives_the_same_bytes(tmp_path: Path):
    first, second = (Builder(tmp_path / place / "camp").whole() for place in ("one", "two"))
    read = [
        [Path(write_report(b.store)).read_bytes(), b.store.get("reports/summary.json")]
        for b in (first, second, first)
    ]
    assert read[0] == read[1] == read[2]
    second.store.put_json("reports/stages.json", {"launch": 1.0})
    assert Path(write_report(second.store)).read_bytes() != read[1][0]


def test_a_large_campaign_gives_a_small_page(tmp_path: Path):
    builder = Builder(tmp_path / "camp", k=16, side=64).campaign().partition()
    losses = (1 / np.sqrt(np.arange(1, 8001))).tolist()
    for folder in [*(f"islands/{n}" for n in range(16)), "router", "monolith"]:
        builder.run(folder, losses=losses)
    builder.compare([f"prompt {n}" for n in range(12)], steps=50).diagnose(splits=("heldout", "train"))
    assert Path(write_report(builder.store)).stat().st_size < 3e6


def test_it_imports_neither_torch_nor_networks():
    heavy = "{'torch', 'diffusers', 'numpy', 'matplotlib', 'pandas'}"
    code = f"import sys, atoll.report.page; print(*sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


# Hostile captions and names.


def test_captions_are_shown_as_text(page: Page):
    shown = [text for text in page.texts["bdi"] if text != "camp"]
    assert shown == [clean(prompt) for prompt in [*PROMPTS * 2, *PROMPTS[:2], PROMPTS[0]]]
    assert [shown[n] for n in (1, 2, 5)] == [PROMPTS[n] for n in (1, 2, 5)]
    alts = [a["alt"] for a in page.all("img")]
    assert {f"Sample of once: {clean(prompt)}" for prompt in PROMPTS} <= set(alts)
    assert not {"\x00", "\u202e"} & set(page.html)
    assert clean(PROMPTS[3]).startswith("two lines and \ufffd a null")
    assert len(clean(PROMPTS[4])) == 240


def test_a_hostile_folder_name_and_settings_are_text(tmp_path: Path):
    builder = Builder(tmp_path / '<img src=x onerror=alert(1)>"').campaign(
        note="</pre><script>x</script>", licence="https://example.org"
    )
    page = Page.of(builder.partition())
    assert page.texts["h1"] == ['<img src=x onerror=alert(1)>"']
    assert "note: </pre><script>x</script>" in page.texts["pre"][0]
    assert page.wrong == page.outside() == []


# Campaigns at every stage.


def test_without_a_partition_it_is_one_line(builder: Builder):
    builder.campaign()
    with pytest.raises(PartitionError, match=r"no partition: run 'atoll partition .*camp' first") as error:
        write_report(builder.store)
    assert "\n" not in str(error.value)
    assert builder.store.list("reports") == []


def test_right_after_the_partition_every_section_says_what_makes_it(builder: Builder):
    warning = "cluster 1 holds 54% of the rows: a catch-all <b>"
    page = Page.of(builder.campaign().partition(warnings=[warning], method="random", encoder=None))
    assert [a["id"] for a in page.all("section")] == SECTIONS and page.wrong == []
    commands = page.texts["code"]
    assert commands.count("atoll compare CAMPAIGN") == commands.count("atoll launch CAMPAIGN") == 3
    assert "atoll train router CAMPAIGN" in commands and "atoll diagnose CAMPAIGN" in commands
    assert len(page.pictures()) == 4
    assert "Cluster 1 holds 54% of the rows: a catch-all <b>." in page.text()
    assert "Clustered by" not in page.text() and "random, K = 4" in page.text()


def test_sizes_of_pictures_have_a_row_for_each_cluster(builder: Builder):
    buckets = {"24x40": [700, 600, 500, 400], "40x24": [300, 300, 300, 300]}
    text = "".join(Page.of(builder.campaign().partition(buckets=buckets)).text().split())
    head = "Trainingrowsbythesizeoftheirpicturesinpixels"
    assert f"{head}Cluster24×4040×24Cluster0700300Cluster1600300" in text


def test_a_run_on_its_way_says_how_far_it_is(builder: Builder, page: Page):
    builder.campaign().partition().run("islands/0").run("islands/1", finished=False)
    way = Page.of(builder)
    assert way.texts["li"] == [
        "Expert 1: 5,760 of 5,760 images",
        *(f"{name}: not started" for name in ("Expert 2", "Expert 3", "Router", "Monolith")),
    ]
    assert "as planned" in way.text()
    for words in ("not started", "not finished", "as planned", "Run atoll"):
        assert words not in page.text()


def test_without_a_monolith_there_are_no_ratios(whole: Builder):
    rows = [{"name": n, "distance": d} for n, d in DISTANCES.items() if n != "monolith"]
    text = Page.of(whole.compare(rows=rows)).text()
    assert "There was no monolith to compare with." in text
    assert "This campaign trains no monolith" not in text
    whole.campaign(monolith=False)
    assert "This campaign trains no monolith" not in Page.of(whole).text(), "it was trained all the same"
    whole.store.delete("monolith/expert/card.json", "monolith/run/metrics.jsonl")
    page = Page.of(whole)
    assert "This campaign trains no monolith" in page.text()
    assert "Monolith: not started" not in page.text() and "Sample of monolith" not in page.html
    figures = summary(whole)
    assert figures["distance"] == {n: d for n, d in DISTANCES.items() if n != "monolith"}
    assert set(figures["ratio_to_monolith"].values()) == {None}
    assert figures["train_flops"]["monolith"] is figures["flops_ratio"] is None


def test_missing_pictures_leave_a_frame(whole: Builder):
    whole.store.delete("reports/compare/once/00.png", "partition/sheets/2.png")
    whole.store.put("reports/compare/full/01.png", b"not a picture at all, but long enough")
    page = Page.of(whole)
    labels = [a["aria-label"] for a in page.with_class("none")]
    assert labels == [f"Sample of once: {PROMPTS[0]}: missing", f"Sample of full: {PROMPTS[1]}: missing"]
    assert page.text().count("The contact sheet is missing.") == 1


def test_shared_features_are_told(whole: Builder, page: Page):
    assert "favours the ensemble" not in page.text()
    whole.compare(metric=METRIC | {"same_features_as_partition": True})
    assert "favours the ensemble" in Page.of(whole).text()
    whole.compare(metric=METRIC | {"akin_to_partition": True})
    assert "of the same family" in Page.of(whole).text()


def test_numbers_of_other_weights_are_said_to_be(whole: Builder, page: Page):
    """Whoever trains or assembles after a comparison must not read its distances as those of today."""
    words = "Since atoll compare the models have changed"
    experts = {"experts/0": "aa" * 32, "router": "bb" * 32}
    more = {**experts, "experts/1": "ee" * 32}
    whole.store.put_json("ensemble/ensemble.json", {"parts": experts})
    assert words not in Page.of(whole.compare(parts={**experts, "monolith": "cd" * 32})).text()
    assert words in Page.of(whole.compare(parts={**experts, "monolith": "ff" * 32})).text()
    assert words in Page.of(whole.compare(parts={**more, "monolith": "cd" * 32})).text()
    assert words not in page.text(), "an earlier version did not say"


# What runs log.


def test_a_torn_last_line_is_passed_over(whole: Builder):
    before = Path(write_report(whole.store)).read_bytes()
    key = "islands/1/run/metrics.jsonl"
    whole.store.put(key, whole.store.get(key) + b'{"step": 999, "samples": 99999, "los')
    assert Path(write_report(whole.store)).read_bytes() == before


def test_losses_that_are_not_finite_are_left_out_and_counted(builder: Builder):
    builder.campaign().partition()
    builder.run("islands/0", finished=False, losses=[1.2, float("nan"), 0.9, float("inf"), 0.8])
    page = Page.of(builder)
    assert "Expert 0: training losses that are not finite and are left out: 2." in page.text()
    drawn = [a["d"] for a in page.all("path")]
    assert len(drawn) > 10 and not [d for d in drawn if "nan" in d or "inf" in d]
    builder.run("islands/0", finished=False, losses=[float("nan")] * 3)
    lines = builder.store.get("islands/0/run/metrics.jsonl").decode().splitlines()[:3]
    builder.store.put("islands/0/run/metrics.jsonl", "\n".join(lines).encode())
    page = Page.of(builder)
    assert "No expert has logged a loss yet." in page.text() and page.with_class("chart") == []


def test_every_run_is_in_every_chart_and_one_without_held_out_rows_is_named(whole: Builder, page: Page):
    charts = [a["aria-label"] for a in page.with_class("chart")]
    assert len(charts) == 4 + 8  # those of training, and those of the reasons
    for chart in charts[:2]:
        for name in ("Expert 0", "Expert 1", "Expert 2", "Expert 3", "Monolith"):
            assert name in chart
    key = "islands/3/run/metrics.jsonl"
    kept = [line for line in whole.store.get(key).decode().splitlines() if "validation" not in line]
    whole.store.put(key, "\n".join(kept).encode())
    assert "Without held-out rows to validate on: Expert 3." in Page.of(whole).text()


# Files of another form.


COMPARED = b'{"format": "atoll/comparison 1", "rows": [], "metric": {}, "prompts": ["a"], "clusters": []}'


@pytest.mark.parametrize(
    ("key", "content", "words"),
    [
        ("reports/compare.json", b'{"format": "atoll/comparison 7"}', "atoll/comparison 7, this"),
        (
            "reports/diagnostics.json",
            b'{"format": "atoll/diagnosis 5"}',
            "atoll/diagnosis 5, this Atoll reads",
        ),
        (
            "partition/partition.json",
            b'{"format": "atoll/partition 2"}',
            "atoll/partition 2, this Atoll reads",
        ),
        ("reports/compare.json", b"{", ""),
        ("reports/compare.json", b"[]", ""),
        ("reports/compare.json", b'{"format": "atoll/comparison 1", "rows": 5}', ""),
        ("reports/compare.json", COMPARED, ""),
        ("reports/stages.json", b"7", ""),
        (
            "reports/diagnostics.json",
            b'{"format": "atoll/diagnosis 1", "settings": {"splits": []}, "tables": []}',
            "",
        ),
        ("partition/partition.json", b'{"format": "atoll/partition 1", "hash": "x"}', ""),
        ("campaign.json", b'{"format": "atoll/campaign 1"}', ""),
        ("islands/0/expert/card.json", b'"x"', ""),
        ("islands/0/island.json", b'{"rows": "x"}', ""),
        ("islands/0/run/metrics.jsonl", b'{"samples": "many", "loss": 1}', "'samples' in a line"),
    ],
)
def test_a_file_of_another_form_is_one_line(whole: Builder, key: str, content: bytes, words: str):
    whole.store.put(key, content)
    with pytest.raises(AtollError) as error:
        write_report(whole.store)
    assert "\n" not in str(error.value)
    assert key in str(error.value) and words in str(error.value)


# The summary.


def test_the_summary_has_every_figure(whole: Builder):
    figures = summary(whole)
    cards = [whole.store.get_json(f"islands/{n}/expert/card.json")["train_flops"] for n in range(4)]
    assert figures == {
        "format": "atoll/summary 1",
        "campaign": "camp",
        "atoll": "0.1.0",
        "seconds": 105.8,
        "stages": {"data ingest": 4.5, "partition": 1.25, "launch": 100.0},
        "images": 3500,
        "partition": "ab" * 32,
        "cluster_sizes": [1000, 900, 800, 700],
        "cluster_heldout": [10, 20, 30, 40],
        "train_flops": {
            "monolith": 340 * 64 * 3e8,
            "experts": sum(cards),
            "router": 50 * 64 * 1e6,
            "pretrain": 0.0,
        },
        "flops_ratio": pytest.approx(1.0 + 50 * 1e6 / (340 * 3e8)),
        "distance": DISTANCES,
        "best": "top-2",
        "default": "once",
        "ratio_to_monolith": {"once": 0.9, "top-1": 0.95, "top-2": 0.85, "full": 1.15, "oracle": 0.75},
        "metric": METRIC | {"steps": 6},
        "compared": {},
        "unfinished": [],
    }
    assert list(figures["distance"]) == list(DISTANCES)


def test_shared_pretraining_is_counted(builder: Builder):
    builder.campaign(budget={"pretrain": 0.25}).partition().plan("pretrain", 85)
    figures = summary(builder.train().compare())
    assert figures["unfinished"] == ["shared pretraining"]
    assert figures["train_flops"]["pretrain"] is figures["flops_ratio"] is None
    text = Page.of(builder.run("pretrain")).text()
    figures = summary(builder)
    assert figures["unfinished"] == [] and figures["train_flops"]["pretrain"] == 85 * 64 * 3e8
    assert figures["flops_ratio"] == pytest.approx(1.25 + 50 * 1e6 / (340 * 3e8))
    assert "Experts, router and shared pretraining together cost 1.250× as much training" in text
    assert "router and shared pretraining included" in text and "Experts + router + pretraining" in text


def test_a_student_stands_beside_the_ensemble_and_not_in_it(builder: Builder):
    builder.campaign().partition().plan("student", 340, batch=16, flops=4e8)
    rows = [{"name": n, "distance": 3.0 + i} for i, n in enumerate(("monolith", "student", "once"))]
    before = summary(builder.train().compare(rows=rows))
    assert before["unfinished"] == ["student"] and before["train_flops"]["student"] is None
    text = Page.of(builder.run("student")).text()
    figures = summary(builder)
    assert figures["train_flops"]["student"] == 340 * 16 * 4e8
    assert figures["flops_ratio"] == before["flops_ratio"] and figures["best"] == "once"
    assert figures["ratio_to_monolith"] == {"student": 4 / 3, "once": 5 / 3}
    assert "for 0.333× the monolith’s training FLOPs, its teachers’ forward passes included" in text
    assert "one model, taught by the experts" in text


def test_the_summary_holds_nothing_that_is_not_known(builder: Builder):
    figures = summary(builder.campaign().partition().run("islands/0").run("router"))
    spent = {"monolith": None, "experts": None, "router": 50 * 64 * 1e6, "pretrain": 0.0}
    assert figures["train_flops"] == spent
    for name in ("flops_ratio", "seconds", "stages", "best", "metric"):
        assert figures[name] is None
    assert figures["distance"] == figures["ratio_to_monolith"] == {}
    assert figures["unfinished"] == ["expert 1", "expert 2", "expert 3", "monolith"]
    rows = [{"name": "monolith", "distance": float("nan")}, {"name": "once", "distance": 3.0}]
    builder.compare(rows=rows, metric={"name": "x", "real_training_pictures": float("inf")})
    figures = summary(builder)
    assert figures["distance"] == {"monolith": None, "once": 3.0}
    assert figures["ratio_to_monolith"] == {"once": None}
    assert figures["metric"] == {"name": "x", "real_training_pictures": None}


# Figures on the page.


def tiles(page: Page) -> dict[str, str]:
    kinds = [attributes.get("class") for attributes in page.all("dd")]
    values = [text for text, kind in zip(page.texts["dd"], kinds, strict=True) if kind == "value"]
    return dict(zip(page.texts["dt"], values, strict=False))


def test_the_head_tells_the_key_figures(whole: Builder, page: Page):
    assert tiles(page) == {
        "Pictures": "3,500",
        "Clusters": "4",
        "Monolith distance": "20.00",
        "Best distance": "17.00",
        "Default distance": "18.00",
        "Training cost": "1.000×",
        "Time": "1 min 46 s",
    }
    assert "top-2: 0.85× the monolith’s" in page.text() and "once: 0.90× the monolith’s" in page.text()
    same = Page.of(whole.compare(default="top-2"))
    assert "Best distance" not in tiles(same) and tiles(same)["Ensemble distance"] == "17.00"
    assert "top-2, the best and the default: 0.85× the monolith’s" in same.text()
    assert summary(whole)["default"] == "top-2"


@pytest.mark.parametrize(
    ("distance", "words"),
    [
        (17.0, "is closer to real pictures than the monolith: 0.85× its distance."),
        (20.01, "is as close to real pictures as the monolith."),
        (30.0, "is further from real pictures than the monolith: 1.50× its distance."),
    ],
)
def test_the_verdict_is_the_figures(whole: Builder, distance: float, words: str):
    rows = [{"name": "monolith", "distance": 20.0}, {"name": "once", "distance": distance}]
    assert f"The ensemble (once) {words}" in Page.of(whole.compare(rows=rows)).text()


def test_every_way_to_route_is_told_in_words(whole: Builder):
    names = ("top-1", "top-2 every 5", "once null sample-1", "sample-1 every 3 null nucleus(0.9)")
    rows = [{"name": name, "distance": 1.0} for name in ("monolith", *names, "my_function")]
    text = Page.of(whole.compare(rows=rows)).text()
    for words in (*(Routing.named(name).describe() for name in names), "my_function"):
        assert words in text, words


def test_the_best_is_marked_and_an_oracle_does_not_compete(page: Page):
    text = page.text().replace(" ", "")
    assert "top-2best" in text and "oraclebest" not in text and "oncedefault" in text


def test_the_distance_is_explained(whole: Builder, page: Page):
    assert (
        "The distance is the Fréchet distance on 64 principal components of efficientnet-lite2 features "
        "(input of 64 px) between 500 sampled pictures and 920 held-out pictures, at the conditions of "
        "held-out rows; Euler sampler, 6 steps, guidance 2.0, averaged weights, seed 0. "
        "Real training pictures, as many, are at 2.125"
    ) in page.text()
    text = Page.of(whole.compare(metric={"name": "x", "distance": "Fréchet distance on 9 parts of x"})).text()
    assert "The distance is the Fréchet distance on 9 parts of x." in text


def test_an_expert_has_one_colour_everywhere(page: Page):
    style = "".join(page.texts["style"])
    for number in range(4):
        assert style.count(f".e{number} {{ --c: var(--e{number}) }}") == 1
        assert len(page.with_class(f"e{number}")) > 15  # chips, strips, bars, cards and charts
    assert page.with_class("e4") == []
    roles = ("monolith", "router", "pretrain", "student", "own", "selected", "mixture")
    for role in roles:
        assert f".{role} {{ --c: var(--{role}); }}" in style
        assert len(re.findall(f"--{role}: #", style)) == 2, "one on light and one on dark"


def test_small_pictures_keep_their_pixels(whole: Builder, page: Page):
    assert len(page.with_class("pixelated")) == 4
    whole.side = 128
    assert Page.of(whole.compare().diagnose()).with_class("pixelated") == []


def test_what_was_evaluated_is_shown_a_table_for_every_protocol(whole: Builder, page: Page):
    captions = len(page.all("caption"))
    whole.evaluate("aa", "ensemble", 417.25)
    whole.evaluate("bb", "monolith", 542.0, "cd" * 32, routing=None, seed=1)
    one = Page.of(whole)
    assert len(one.all("caption")) == captions + 1
    assert "1,000 pictures against 1,512 of the campaign's data, heldout rows; net at 64 px" in one.text()
    assert "417.2" in one.text() and "0.01234 ± 0.0020" in one.text()
    assert "Note: the covariance is singular." in one.text()
    assert "numbers of different tables do not compare" not in one.text() and "monolith*" not in one.text()
    whole.evaluate("bb", "monolith", 542.0, "00" * 32, routing=None, seed=1)
    tree = whole.store.get_json("reports/evaluate/bb.json")
    tree["values"] = dict(reversed(tree["values"].items()))  # as they were asked for: kid, frechet
    whole.store.put_json("reports/evaluate/bb.json", tree)
    whole.evaluate("cc", "<b>ours</b>", 3.5, samples=50)
    whole.store.put_json("reports/evaluate/dd.json", {"format": "atoll/point 9"})
    whole.store.put_json("reports/evaluate/references/ee.json", {"format": "atoll/statistics 1"})
    two = Page.of(whole)
    assert re.search(r"monolith\*\s*–\s*2\s*1\s*542\.0\s*0\.01234", two.text()), "of other weights than now"
    assert len(two.all("caption")) == captions + 2 and "<b>ours</b>" in two.text()
    assert "numbers of different tables do not compare" in two.text()
    tree["values"]["frechet"]["value"] = None
    whole.store.put_json("reports/evaluate/bb.json", tree)
    with pytest.raises(DataError, match=r"reports/evaluate/bb\.json"):
        write_report(whole.store)
