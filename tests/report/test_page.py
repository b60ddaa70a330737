import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.base.errors import AtollError, DataError, PartitionError
from atoll.ensemble.routing import Routing
from atoll.report.page import write_report
from atoll.report.wording import clean
from atoll.store.store import Store
from report.campaigns import DISTANCES, PROMPTS, Builder
from report.pages import Page

SECTIONS = ["samples", "routing", "clusters", "training", "strategies", "why", "flops", "provenance"]


def page(builder: Builder) -> Page:
    return Page(Path(write_report(builder.store)).read_text())


def summary(builder: Builder) -> dict:
    write_report(builder.store)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(builder.store.get("reports/summary.json"), parse_constant=refuse)


# The page as a whole.


def test_a_finished_campaign_is_one_page_without_references_to_the_outside(builder: Builder):
    path = write_report(builder.whole().store)
    assert path == builder.store.name("reports/index.html")
    found = Page(Path(path).read_text())
    assert found.outside() == []
    assert found.wrong == []
    assert {"script", "link", "iframe", "object", "base", "form"}.isdisjoint(tag for tag, _ in found.elements)
    assert not [name for _, attributes in found.elements for name in attributes if name.startswith("on")]


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


def test_every_picture_is_there_once_and_decodes(builder: Builder):
    found = page(builder.whole())
    pictures = found.pictures()
    shown = len(PROMPTS) * (len(DISTANCES) + 1)
    thumbnails, sheets = len(PROMPTS), 4
    pairs = 2 * 3  # two suspicious samples and one cluster's nearest, beside their training pictures
    assert len(pictures) == shown + thumbnails + sheets + pairs
    assert [p.size for p in pictures].count((16, 16)) == shown + thumbnails + pairs
    sizes = [(int(a["width"]), int(a["height"])) for a in found.all("img")]
    assert sizes == [p.size for p in pictures]


def test_everything_to_look_at_says_what_it_is(builder: Builder):
    found = page(builder.whole())
    assert all(attributes["alt"].strip() for attributes in found.all("img"))
    assert all(a["role"] == "img" and a["aria-label"].strip() for a in found.all("svg"))
    assert len(found.all("html")) == len(found.all("h1")) == len(found.all("main")) == 1
    assert found.all("html")[0]["lang"] == "en"


def test_links_lead_to_sections(builder: Builder):
    found = page(builder.whole())
    assert [a["href"][1:] for a in found.all("a")] == SECTIONS
    assert [a["id"] for a in found.all("section")] == SECTIONS


def test_the_same_campaign_gives_the_same_bytes(tmp_path: Path):
    first, second = (Builder(tmp_path / place / "camp").whole() for place in ("one", "two"))
    read = [
        [Path(write_report(b.store)).read_bytes(), b.store.get("reports/summary.json")]
        for b in (first, second)
    ]
    again = [Path(write_report(first.store)).read_bytes(), first.store.get("reports/summary.json")]
    assert read[0] == read[1] == again


def test_a_change_of_a_figure_changes_the_page(builder: Builder):
    before = Path(write_report(builder.whole().store)).read_bytes()
    builder.store.put_json("reports/stages.json", {"launch": 1.0})
    assert Path(write_report(builder.store)).read_bytes() != before


def test_a_large_campaign_takes_less_than_two_seconds_of_the_processor(tmp_path: Path):
    builder = Builder(tmp_path / "camp", k=16, side=64).campaign().partition()
    losses = (1 / np.sqrt(np.arange(1, 8001))).tolist()
    for folder in [*(f"islands/{n}" for n in range(16)), "router", "monolith"]:
        builder.run(folder, losses=losses)
    builder.compare([f"prompt {n}" for n in range(12)], steps=50).diagnose(splits=("heldout", "train"))
    start = time.process_time()  # not the clock's: other tests run beside it
    path = write_report(builder.store)
    assert time.process_time() - start < 2
    assert Path(path).stat().st_size < 3e6


def test_it_imports_neither_torch_nor_networks():
    code = "import sys, atoll.report.page; print(*sorted({'torch', 'diffusers', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


# Hostile captions and names.


def test_captions_are_shown_as_text(builder: Builder):
    found = page(builder.whole())
    shown = [text for text in found.texts["bdi"] if text != "camp"]
    assert shown == [clean(prompt) for prompt in [*PROMPTS * 2, *PROMPTS[:2], PROMPTS[0]]]
    assert shown[1] == PROMPTS[1]
    assert shown[2] == PROMPTS[2]
    assert shown[5] == PROMPTS[5]
    alts = [a["alt"] for a in found.all("img")]
    for prompt in PROMPTS:
        assert f"Sample of once: {clean(prompt)}" in alts


def test_a_caption_cannot_turn_or_split_the_text(builder: Builder):
    found = page(builder.whole())
    assert not {"\x00", "\u202e", "\ud800"} & set(found.html)
    assert clean(PROMPTS[3]).startswith("two lines and \ufffd a null")
    assert len(clean(PROMPTS[4])) == 240


def test_a_hostile_folder_name_is_text(tmp_path: Path):
    builder = Builder(tmp_path / '<img src=x onerror=alert(1)>"').whole()
    found = page(builder)
    assert found.texts["h1"] == ['<img src=x onerror=alert(1)>"']
    assert found.outside() == []


def test_settings_are_text(builder: Builder):
    builder.whole().campaign_again(note="</pre><script>x</script>", licence="https://example.org")
    found = page(builder)
    assert "note: </pre><script>x</script>" in found.texts["pre"][0]
    assert found.wrong == found.outside() == []


# Campaigns at every stage.


def test_without_a_partition_it_is_one_line(builder: Builder):
    builder.campaign()
    with pytest.raises(
        PartitionError, match=r"has no partition: run 'atoll partition .*camp' first"
    ) as error:
        write_report(builder.store)
    assert "\n" not in str(error.value)
    assert builder.store.list("reports") == []


def test_right_after_the_partition_every_section_says_what_makes_it(builder: Builder):
    found = page(builder.campaign().partition())
    assert [a["id"] for a in found.all("section")] == SECTIONS
    assert found.wrong == []
    commands = found.texts["code"]
    assert commands.count("atoll compare CAMPAIGN") == 3
    assert commands.count("atoll launch CAMPAIGN") == 3
    assert "atoll train router CAMPAIGN" in commands
    for name in ("Expert 0", "Expert 3", "Router", "Monolith"):
        assert f"{name}: not started" in found.text()
    assert len(found.pictures()) == 4


def test_an_island_on_its_way_says_how_far_it_is(builder: Builder):
    builder.campaign().partition().run("islands/0").run("islands/1", finished=False)
    found = page(builder)
    assert found.texts["li"] == [
        "Expert 1: 5,760 of 5,760 images",
        "Expert 2: not started",
        "Expert 3: not started",
        "Router: not started",
        "Monolith: not started",
    ]
    assert "as planned" in found.text()


def test_a_finished_campaign_reports_nothing_missing(builder: Builder):
    text = page(builder.whole()).text()
    assert "not started" not in text
    assert "not finished" not in text
    assert "as planned" not in text
    assert "Run atoll" not in text


def test_without_a_monolith_there_are_no_ratios(builder: Builder):
    builder.campaign(monolith=False).partition().train().stages()
    builder.store.delete("monolith/expert/card.json", "monolith/run/metrics.jsonl")
    rows = [{"name": n, "distance": d} for n, d in DISTANCES.items() if n != "monolith"]
    found = page(builder.compare(rows=rows))
    assert "This campaign trains no monolith" in found.text()
    assert "Monolith: not started" not in found.text()
    assert "Sample of monolith" not in found.html
    made = summary(builder)
    assert made["distance"] == {n: d for n, d in DISTANCES.items() if n != "monolith"}
    assert set(made["ratio_to_monolith"].values()) == {None}
    assert made["train_flops"]["monolith"] is None
    assert made["flops_ratio"] is None


def test_a_monolith_that_was_trained_all_the_same_counts(builder: Builder):
    found = page(builder.whole().campaign_again(monolith=False))
    assert "a monolith of the same training cost stands beside it" in found.text()
    assert "This campaign trains no" not in found.text()


def test_a_comparison_before_the_monolith_says_so(builder: Builder):
    rows = [{"name": n, "distance": d} for n, d in DISTANCES.items() if n != "monolith"]
    text = page(builder.whole().compare(rows=rows)).text()
    assert "There was no monolith to compare with." in text
    assert "This campaign trains no monolith" not in text


def test_missing_pictures_leave_a_frame(builder: Builder):
    builder.whole()
    builder.store.delete("reports/compare/once/00.png", "partition/sheets/2.png")
    builder.store.put("reports/compare/full/01.png", b"not a picture at all, but long enough")
    found = page(builder)
    labels = [a["aria-label"] for a in found.with_class("none")]
    assert labels == [f"Sample of once: {PROMPTS[0]}: missing", f"Sample of full: {PROMPTS[1]}: missing"]
    assert found.text().count("The contact sheet is missing.") == 1


def test_warnings_of_the_balance_are_shown(builder: Builder):
    warning = "cluster 1 holds 54% of the rows: a catch-all <b>"
    found = page(builder.campaign().partition(warnings=[warning]))
    assert "Cluster 1 holds 54% of the rows: a catch-all <b>." in found.text()


def test_a_random_partition_has_no_encoder(builder: Builder):
    text = page(builder.campaign().partition(method="random", encoder=None)).text()
    assert "Clustered by" not in text
    assert "random, K = 4" in text


def test_shared_features_are_told(builder: Builder):
    text = page(builder.whole()).text()
    assert "favours the ensemble" not in text
    metric = builder.store.get_json("reports/compare.json")["metric"] | {"same_features_as_partition": True}
    assert "favours the ensemble" in page(builder.compare(metric=metric)).text()
    metric |= {"same_features_as_partition": False, "akin_to_partition": True}
    assert "of the same family" in page(builder.compare(metric=metric)).text()


# What runs log.


def test_a_torn_last_line_is_passed_over(builder: Builder):
    builder.whole()
    before = Path(write_report(builder.store)).read_bytes()
    key = "islands/1/run/metrics.jsonl"
    builder.store.put(key, builder.store.get(key) + b'{"step": 999, "samples": 99999, "los')
    assert Path(write_report(builder.store)).read_bytes() == before


def test_losses_that_are_not_finite_are_left_out_and_counted(builder: Builder):
    builder.campaign().partition()
    builder.run("islands/0", finished=False, losses=[1.2, float("nan"), 0.9, float("inf"), 0.8])
    found = page(builder)
    assert "Expert 0: training losses that are not finite and are left out: 2." in found.text()
    drawn = [a["d"] for a in found.all("path")]
    assert len(drawn) > 10
    assert not [d for d in drawn if "nan" in d or "inf" in d]
    assert summary(builder)["unfinished"][0] == "expert 0"


def test_losses_that_are_never_finite_draw_nothing(builder: Builder):
    builder.campaign().partition().run("islands/0", finished=False, losses=[float("nan")] * 3)
    lines = builder.store.get("islands/0/run/metrics.jsonl").decode().splitlines()[:3]
    builder.store.put("islands/0/run/metrics.jsonl", "\n".join(lines).encode())
    found = page(builder)
    assert "No expert has logged a loss yet." in found.text()
    assert found.with_class("chart") == []


def test_an_island_without_held_out_rows_is_named(builder: Builder):
    builder.whole()
    key = "islands/3/run/metrics.jsonl"
    kept = [line for line in builder.store.get(key).decode().splitlines() if "validation" not in line]
    builder.store.put(key, "\n".join(kept).encode())
    assert "Without held-out rows to validate on: Expert 3." in page(builder).text()


def test_every_run_is_in_every_chart(builder: Builder):
    charts = [a["aria-label"] for a in page(builder.whole()).with_class("chart")]
    assert len(charts) == 4 + 8  # those of training, and those of the reasons
    for chart in charts[:2]:
        for name in ("Expert 0", "Expert 1", "Expert 2", "Expert 3", "Monolith"):
            assert name in chart


# Files of another form.


def test_another_schema_is_one_line(builder: Builder):
    builder.whole().partition(schema=2)
    with pytest.raises(PartitionError, match="is of version 2, this Atoll reads atoll/partition 1"):
        write_report(builder.store)
    builder.partition().diagnose(schema=5)
    with pytest.raises(DataError, match=r"version 5, this Atoll reads atoll/diagnosis 1.*atoll diagnose"):
        write_report(builder.store)
    builder.diagnose().compare(schema=7)
    with pytest.raises(DataError, match="is of version 7, this Atoll reads atoll/comparison 1"):
        write_report(builder.store)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"ece": "much"}, "a table's ece is no number"), ({"nll": None}, ""), ({"-": "nll"}, "nll")],
)
def test_tables_of_another_form_are_one_line(builder: Builder, change: dict[str, object], words: str):
    builder.whole()
    found = builder.store.get_json("reports/diagnostics.json")
    table = found["tables"]["router"]
    for name, value in change.items():
        place = table["columns"].index(value if name == "-" else name)
        if name == "-":
            table["columns"][place] = "something else"
        else:
            table["rows"][0][place] = value
    builder.store.put_json("reports/diagnostics.json", found)
    if not words:
        page(builder)
        return
    with pytest.raises(DataError, match=words) as error:
        write_report(builder.store)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("reports/compare.json", b"{"),
        ("reports/compare.json", b"[]"),
        ("reports/compare.json", b'{"schema": 1, "rows": 5}'),
        ("reports/compare.json", b'{"schema": 1}'),
        ("reports/stages.json", b"7"),
        ("reports/diagnostics.json", b'{"schema": 1}'),
        ("reports/diagnostics.json", b'{"schema": 1, "settings": {"splits": []}, "tables": []}'),
        ("partition/partition.json", b'{"schema": 1, "hash": "x"}'),
        ("campaign.json", b'{"schema": 1}'),
        ("islands/0/expert/card.json", b'"x"'),
        ("islands/0/expert/card.json", b"{}"),
        ("islands/0/island.json", b'{"rows": "x"}'),
        (
            "reports/compare.json",
            b'{"schema": 1, "rows": [], "metric": {}, "prompts": ["a"], "clusters": []}',
        ),
        ("islands/0/run/metrics.jsonl", b'{"samples": "many", "loss": 1}'),
    ],
)
def test_a_file_of_another_form_is_one_line(builder: Builder, key: str, content: bytes):
    builder.whole().store.put(key, content)
    with pytest.raises(AtollError) as error:
        write_report(builder.store)
    assert "\n" not in str(error.value)
    assert key.rpartition("/")[0] in str(error.value)


# The summary.


def test_the_summary_has_every_figure(builder: Builder):
    made = summary(builder.whole())
    cards = [builder.store.get_json(f"islands/{n}/expert/card.json")["train_flops"] for n in range(4)]
    assert made == {
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
        "metric": builder.store.get_json("reports/compare.json")["metric"],
        "unfinished": [],
    }
    assert list(made["distance"]) == list(DISTANCES)


def test_a_seed_run_is_counted(builder: Builder):
    builder.campaign(budget={"pretrain": 0.25}).partition().seed(85)
    made = summary(builder.train().compare())
    assert made["unfinished"] == ["shared pretraining"]
    assert made["train_flops"]["pretrain"] is made["flops_ratio"] is None
    found = page(builder.run("pretrain"))
    made = summary(builder)
    assert made["unfinished"] == [] and made["train_flops"]["pretrain"] == 85 * 64 * 3e8
    assert made["flops_ratio"] == pytest.approx(1.25 + 50 * 1e6 / (340 * 3e8))
    assert "Experts, router and shared pretraining together cost 1.250× as much training" in found.text()
    assert "router and shared pretraining included" in found.text()
    assert "Experts + router + pretraining" in found.text()


def test_a_student_stands_beside_the_ensemble_and_not_in_it(builder: Builder):
    builder.campaign().partition().student(340)
    names = ["monolith", "student", "once"]
    rows = [{"name": name, "distance": 3.0 + number} for number, name in enumerate(names)]
    made = summary(builder.train().compare(rows=rows))
    assert made["unfinished"] == ["student"] and made["train_flops"]["student"] is None
    whole = made["flops_ratio"]
    found = page(builder.run("student"))
    made = summary(builder)
    assert made["train_flops"]["student"] == 340 * 16 * 4e8
    assert made["flops_ratio"] == whole and made["best"] == "once"
    assert made["ratio_to_monolith"] == {"student": 4 / 3, "once": 5 / 3}
    assert "for 0.333× the monolith’s training FLOPs, its teachers’ forward passes included" in found.text()
    assert "one model, taught by the experts" in found.text()


def test_the_summary_of_an_unfinished_campaign_holds_nothing_it_does_not_know(builder: Builder):
    made = summary(builder.campaign().partition().run("islands/0").run("router"))
    assert made["train_flops"] == {
        "monolith": None,
        "experts": None,
        "router": 50 * 64 * 1e6,
        "pretrain": 0.0,
    }
    assert made["flops_ratio"] is made["seconds"] is made["stages"] is made["best"] is made["metric"] is None
    assert made["distance"] == made["ratio_to_monolith"] == {}
    assert made["unfinished"] == ["expert 1", "expert 2", "expert 3", "monolith"]


def test_figures_that_are_not_finite_are_null(builder: Builder):
    rows = [{"name": "monolith", "distance": float("nan")}, {"name": "once", "distance": 3.0}]
    builder.whole().compare(rows=rows, metric={"name": "x", "real_training_pictures": float("inf")})
    made = summary(builder)
    assert made["distance"] == {"monolith": None, "once": 3.0}
    assert made["ratio_to_monolith"] == {"once": None}
    assert made["metric"] == {"name": "x", "real_training_pictures": None}


# Figures on the page.


def tiles(found: Page) -> dict[str, str]:
    labels = found.texts["dt"]
    values = [
        text for text, a in zip(found.texts["dd"], found.all("dd"), strict=True) if a.get("class") == "value"
    ]
    return dict(zip(labels, values, strict=False))


def test_the_head_tells_the_key_figures(builder: Builder):
    found = page(builder.whole())
    assert tiles(found) == {
        "Pictures": "3,500",
        "Islands": "4",
        "Monolith distance": "20.00",
        "Best distance": "17.00",
        "Default distance": "18.00",
        "Training cost": "1.000×",
        "Time": "1 min 46 s",
    }
    assert "top-2: 0.85× the monolith’s" in found.text()
    assert "once: 0.90× the monolith’s" in found.text()


def test_every_way_to_route_is_told_in_words(builder: Builder):
    names = [
        "monolith",
        "top-1",
        "top-2 every 5",
        "once null sample-1",
        "sample-1 every 3 null nucleus(0.9)",
    ]
    row = {"distance": 1.0, "seconds": 1.0, "gflops_per_step": 0.1}
    text = page(builder.whole().compare(rows=[row | {"name": name} for name in names])).text()
    for words in (Routing.named(name).describe() for name in names if name not in ("monolith", "student")):
        assert words in text, words


def test_the_default_may_be_the_best(builder: Builder):
    builder.whole().compare(default="top-2")
    found = page(builder)
    assert "Best distance" not in tiles(found)
    assert tiles(found)["Ensemble distance"] == "17.00"
    assert "top-2, the best and the default: 0.85× the monolith’s" in found.text()


def test_the_default_is_that_of_the_comparison(builder: Builder):
    builder.whole().compare(default="top-1")
    assert tiles(page(builder))["Default distance"] == "19.00"
    assert summary(builder)["default"] == "top-1"


@pytest.mark.parametrize(
    ("distance", "words"),
    [
        (17.0, "is closer to real pictures than the monolith: 0.85× its distance."),
        (20.01, "is as close to real pictures as the monolith."),
        (30.0, "is further from real pictures than the monolith: 1.50× its distance."),
    ],
)
def test_the_verdict_is_the_figures(builder: Builder, distance: float, words: str):
    rows = [{"name": "monolith", "distance": 20.0}, {"name": "once", "distance": distance}]
    assert f"The ensemble (once) {words}" in page(builder.whole().compare(rows=rows)).text()


def test_the_best_is_marked_and_an_oracle_does_not_compete(builder: Builder):
    text = page(builder.whole()).text()
    assert "top-2best" in text.replace(" ", "")
    assert "oraclebest" not in text.replace(" ", "")


def test_the_distance_is_explained(builder: Builder):
    text = page(builder.whole()).text()
    assert (
        "The distance is the Fréchet distance on 64 principal components of efficientnet-lite2 features "
        "(input of 64 px) between 500 sampled pictures and 920 held-out pictures, at the conditions of "
        "held-out rows; Euler sampler, 6 steps, guidance 2.0, averaged weights, seed 0."
    ) in text
    assert "Real training pictures, as many, are at 2.125" in text


def test_a_metric_that_names_itself_is_not_named_twice(builder: Builder):
    text = page(
        builder.whole().compare(metric={"name": "x", "distance": "Fréchet distance on 9 parts of x"})
    ).text()
    assert "The distance is the Fréchet distance on 9 parts of x." in text


def test_strips_show_the_routing(builder: Builder):
    found = page(builder.whole())
    strips = found.with_class("strip")
    assert len(strips) == 3 * len(PROMPTS)
    assert strips[0]["aria-label"] == "once, sample 1: mostly expert 0 in steps 1 to 6"
    assert strips[3]["aria-label"] == "once, sample 2: mostly expert 1 in steps 1 to 6"


def test_an_expert_has_one_colour_everywhere(builder: Builder):
    found = page(builder.whole())
    style = "".join(found.texts["style"])
    for number in range(4):
        assert style.count(f".e{number} {{ --c: var(--e{number}) }}") == 1
        # Chips, strips, bars, cards and charts.
        assert len(found.with_class(f"e{number}")) > 15
    assert found.with_class("e4") == []


def test_small_pictures_keep_their_pixels(tmp_path: Path):
    small, large = (Builder(tmp_path / str(side), side=side).whole() for side in (16, 128))
    assert len(page(small).with_class("pixelated")) == 4
    assert page(large).with_class("pixelated") == []


def test_the_command_writes_it(builder: Builder, monkeypatch: pytest.MonkeyPatch):
    from click.testing import CliRunner

    import atoll.cli

    class Opened:
        store = builder.whole().store

    monkeypatch.setattr(atoll.cli, "_open", lambda campaign: Opened)
    result = CliRunner().invoke(atoll.cli.atoll, ["report", builder.store.location])
    assert result.output == f"wrote {builder.store.name('reports/index.html')}\n"
    assert Store.open(builder.store.location).exists("reports/summary.json")


def test_numbers_of_other_weights_are_said_to_be(builder: Builder):
    """Whoever trains or assembles after a comparison must not read its distances as those of today."""
    builder.whole()
    experts = {"experts/0": "aa" * 32, "router": "bb" * 32}
    builder.store.put_json("ensemble/ensemble.json", {"parts": experts})
    builder.compare(parts={**experts, "monolith": "cd" * 32})
    assert "the models have changed" not in page(builder).text()
    builder.store.put_json("ensemble/ensemble.json", {"parts": {**experts, "experts/1": "ee" * 32}})
    assert "Since atoll compare the models have changed" in page(builder).text()
    builder.compare(parts={**experts, "experts/1": "ee" * 32, "monolith": "ff" * 32})
    assert "Since atoll compare the models have changed" in page(builder).text()
    builder.compare()
    assert "the models have changed" not in page(builder).text(), "an earlier version did not say"


def evaluated(
    builder: Builder, key: str, name: str = "ensemble", value: float = 3.5, **protocol: Any
) -> None:
    """A report of `atoll evaluate`."""
    form = {"extractor": "net", "extractor_size": 64, "samples": 1000, "reference": "the campaign's data"}
    form |= {"reference_count": 1512, "reference_split": "heldout", "guidance": 2.0, "routing": "top-1"}
    kid = {
        "label": "kernel distance on net",
        "value": 0.01234,
        "deviation": 0.002,
        "settings": {},
        "note": None,
    }
    frechet = {
        "label": "Fréchet distance on net",
        "value": value,
        "deviation": None,
        "settings": {"components": 64},
    }
    frechet["note"] = "the covariance of the samples is singular"
    form |= {"extractor_hash": "ab", "reference_hash": "cd", "resize": "area", "rounding": "8 bits"}
    form |= {"picture_size": [16, 16], "code": "0.1.0"}
    content = {"schema": 1, "subject": {"name": name}, "protocol": form | protocol, "cost": {}}
    values = {"frechet": frechet, "kid": kid}
    builder.store.put_json(f"reports/evaluate/{key}.json", {**content, "values": values, "key": key})


def test_what_was_evaluated_is_shown_a_table_for_every_protocol(builder: Builder):
    builder.whole()
    before = len(page(builder).all("caption"))
    evaluated(builder, "aa", value=417.25)
    evaluated(builder, "bb", "monolith", value=542.0, routing=None, seed=1)
    found = page(builder)
    assert len(found.all("caption")) == before + 1
    assert "1,000 pictures against 1,512 of the campaign's data, heldout rows; net at 64 px" in found.text()
    assert "417.2" in found.text() and "0.01234 ± 0.0020" in found.text()
    assert "Note: the covariance of the samples is singular." in found.text()
    assert "numbers of different tables do not compare" not in found.text()
    tree = builder.store.get_json("reports/evaluate/bb.json")
    tree["values"] = dict(reversed(tree["values"].items()))  # as they were asked for: kid, frechet
    tree["subject"]["weights"] = {"monolith": "00" * 32}
    builder.store.put_json("reports/evaluate/bb.json", tree)
    again = page(builder).text()
    assert again.replace("monolith*", "monolith") != again, "it is of other weights than are published"
    assert re.search(r"monolith\*\s*–\s*2\s*1\s*542\.0\s*0\.01234", again)
    tree["subject"]["weights"] = {"monolith": "cd" * 32}
    builder.store.put_json("reports/evaluate/bb.json", tree)
    assert "monolith*" not in page(builder).text()
    evaluated(builder, "cc", "<b>made</b>", samples=50)
    found = page(builder)
    assert len(found.all("caption")) == before + 2 and "<b>made</b>" in found.text()
    assert "numbers of different tables do not compare" in found.text()
    builder.store.put_json("reports/evaluate/dd.json", {"schema": 9})
    builder.store.put_json("reports/evaluate/references/ee.json", {"schema": 1})
    assert len(page(builder).all("caption")) == before + 2


def test_a_damaged_evaluation_is_named(builder: Builder):
    builder.whole()
    evaluated(builder, "aa")
    tree = builder.store.get_json("reports/evaluate/aa.json")
    tree["values"]["frechet"]["value"] = None
    builder.store.put_json("reports/evaluate/aa.json", tree)
    with pytest.raises(DataError, match=r"reports/evaluate/aa\.json"):
        write_report(builder.store)
