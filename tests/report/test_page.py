"""The pages as wholes: self-contained, well-formed, safe, there at every stage of a campaign or data set."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import yaml
from PIL import Image

from atoll.base.errors import AtollError, PartitionError
from atoll.campaign.report_table import ReportTable
from atoll.data.contents import Histogram
from atoll.data.formats import ClusterMap
from atoll.model.routing import Routing
from atoll.report.data_page import bars
from atoll.report.facts import clean
from atoll.report.page import write_report
from helpers import command, refused
from report.campaigns import DISTANCES, METRIC, PROMPTS, Builder
from report.pages import Page

SECTIONS = ["samples", "routing", "clusters", "learning", "strategies", "why", "flops", "provenance"]


def summary(builder: Builder) -> dict[str, Any]:
    write_report(builder.store)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    figures: dict[str, Any] = json.loads(builder.store.get("reports/summary.json"), parse_constant=refuse)
    return figures


def test_the_page_of_a_finished_campaign_is_as_recorded(page: Page):
    page.is_as_recorded("finished")
    assert {"script", "link", "iframe", "object", "base", "form"}.isdisjoint(tag for tag, _ in page.elements)
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert [a["href"][1:] for a in page.all("a")] == [a["id"] for a in page.all("section")] == SECTIONS
    pictures = page.pictures()
    shown, thumbnails, sheets = len(PROMPTS) * (len(DISTANCES) + 1), len(PROMPTS), 4
    pairs = 2 * 3  # two suspicious samples and one cluster's nearest, beside their training pictures
    assert len(pictures) == shown + thumbnails + sheets + pairs
    assert [p.size for p in pictures].count((16, 16)) == shown + thumbnails + pairs
    assert [(int(a["width"]), int(a["height"])) for a in page.all("img")] == [p.size for p in pictures]
    drawn = [*page.all("svg"), *page.with_class("bar")]
    assert len(drawn) > 30 and all(a["role"] == "img" and a["aria-label"].strip() for a in drawn)
    assert len(page.all("html")) == len(page.all("h1")) == len(page.all("main")) == 1


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


def test_the_same_campaign_gives_the_same_bytes_and_a_torn_last_line_none(tmp_path: Path):
    first, second = (Builder(tmp_path / place / "camp").whole() for place in ("one", "two"))
    key = "islands/1/run/metrics.jsonl"
    read = []
    for builder in (first, second, first):
        read.append(
            [Path(write_report(builder.store)).read_bytes(), builder.store.get("reports/summary.json")]
        )
        builder.store.put(key, builder.store.get(key) + b'{"step": 999, "samples": 99999, "los')
    assert read[0] == read[1] == read[2]
    second.store.put_json("reports/stages.json", {"launch": 1.0})
    assert Path(write_report(second.store)).read_bytes() != read[1][0]


def test_a_large_campaign_gives_a_small_page(tmp_path: Path):
    builder = Builder(tmp_path / "camp", k=16, side=64).campaign().partition()
    losses = (1 / np.sqrt(np.arange(1, 2001))).tolist()
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
    page.is_as_recorded("partitioned")
    assert [a["id"] for a in page.all("section")] == SECTIONS


def test_a_run_on_its_way_says_how_far_it_is(builder: Builder):
    """With pictures of two sizes, a map of the clusters, and an expert without held-out rows."""
    buckets = {"24x40": [700, 600, 500, 400], "40x24": [300, 300, 300, 300]}
    builder.campaign().partition(buckets=buckets, inertia={"clusters": 0.5, "random": 1.25, "free": 0.4})
    points = [(0.0, 0.0, 0), (1.0, 0.5, 1), (0.2, 0.7, 2), (0.4, 0.1, 3), (0.5, 0.5, 0)]
    words = [["dog", "cat"], [], ["<b>"], []]
    builder.store.put_json(ClusterMap.PLACE, ClusterMap(points=points, explained=0.75, words=words).to_json())
    builder.run("islands/0").run("islands/1", finished=False).run("islands/3")
    key = "islands/3/run/metrics.jsonl"
    kept = [line for line in builder.store.get(key).decode().splitlines() if "validation" not in line]
    builder.store.put(key, "\n".join(kept).encode())
    Page.of(builder).is_as_recorded("on-its-way")
    assert "Compactness" not in Page.of(builder.partition(inertia={"clusters": 0.0, "random": 0.0})).text()


def test_without_a_monolith_there_are_no_ratios(whole: Builder):
    rows = [{"name": n, "distance": d} for n, d in DISTANCES.items() if n != "monolith"]
    text = Page.of(whole.compare(rows=rows)).text()
    assert "There is no monolith to compare with." in text
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


def test_missing_pictures_leave_a_frame_and_large_ones_are_not_pixelated(whole: Builder, page: Page):
    assert len(page.with_class("pixelated")) == 4
    whole.store.delete("reports/compare/once/00.png", "partition/sheets/2.png")
    whole.store.put("reports/compare/full/01.png", b"not a picture at all, but long enough")
    missing = Page.of(whole)
    labels = [a["aria-label"] for a in missing.with_class("none")]
    assert labels == [f"Sample of once: {PROMPTS[0]}: missing", f"Sample of full: {PROMPTS[1]}: missing"]
    assert missing.text().count("The contact sheet is missing.") == 1
    whole.side = 128
    assert Page.of(whole.compare().diagnose()).with_class("pixelated") == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metric": METRIC | {"same_features_as_partition": True}}, "which favours the ensemble"),
        ({"metric": METRIC | {"akin_to_partition": True}}, "of the same family"),
        ({"metric": {"name": "x", "distance": "Fréchet of x"}}, "The distance is the Fréchet of x."),
        ({"default": "top-2"}, "Ensemble distance17.00top-2, best and default: 0.85× the monolith’s"),
        ({"rows": 16.0}, "is closer to real images than the monolith: 0.80× its distance."),
        ({"rows": 16.0}, "its distance. A step costs 4.00× the monolith’s."),
        ({"rows": 16.0, "name": "once null pretrain"}, "Shared pretraining guides it, but not the monolith."),
        ({"rows": 20.01}, "is as close to real images as the monolith."),
        ({"rows": 30.0}, "is further from real images than the monolith: 1.50× its distance."),
    ],
)
def test_what_a_comparison_says_of_itself_is_told(
    whole: Builder, page: Page, fields: dict[str, Any], words: str
):
    if distance := fields.get("rows"):
        monolith = {"name": "monolith", "distance": 20.0, "gflops_per_step": 0.5}
        name = fields.get("name", "once")
        fields = {"rows": [monolith, {"name": name, "distance": distance, "gflops_per_step": 2.0}]}
    assert words not in page.text() and words in Page.of(whole.compare(**fields)).text()


def test_numbers_of_other_weights_are_said_to_be(whole: Builder):
    """Whoever trains or assembles after a comparison must not read its distances as those of today."""
    words = "The models have changed since atoll compare"
    experts = {"experts/0": "aa" * 32, "router": "bb" * 32}
    more = {**experts, "experts/1": "ee" * 32}
    whole.store.put_json("ensemble/ensemble.json", {"parts": experts})
    assert words not in Page.of(whole.compare(parts={**experts, "monolith": "cd" * 32})).text()
    assert words in Page.of(whole.compare(parts={**experts, "monolith": "ff" * 32})).text()
    assert words in Page.of(whole.compare(parts={**more, "monolith": "cd" * 32})).text()


def test_losses_that_are_not_finite_are_left_out_and_counted(builder: Builder):
    builder.campaign().partition()
    builder.run("islands/0", finished=False, losses=[1.2, float("nan"), 0.9, float("inf"), 0.8])
    page = Page.of(builder)
    assert "Expert 0: training losses that are not finite, left out: 2." in page.text()
    drawn = [a["d"] for a in page.all("path")]
    assert len(drawn) > 10 and not [d for d in drawn if "nan" in d or "inf" in d]
    builder.run("islands/0", finished=False, losses=[float("nan")] * 3)
    lines = builder.store.get("islands/0/run/metrics.jsonl").decode().splitlines()[:3]
    builder.store.put("islands/0/run/metrics.jsonl", "\n".join(lines).encode())
    page = Page.of(builder)
    assert "No expert has logged a loss yet." in page.text() and page.with_class("chart") == []


def test_captions_that_are_ignored_are_told(whole: Builder, page: Page):
    key, words = "islands/1/run/metrics.jsonl", "Expert 1 ignores its captions"
    whole.store.put(key, whole.store.get(key).replace(b'"times"', b'"condition_gain": 0.0, "times"'))
    assert words not in page.text() and words in Page.of(whole).text()


def test_every_way_to_route_is_told_in_words(whole: Builder):
    names = ("top-1", "top-2 every 5", "once null sample-1", "sample-1 every 3 null nucleus(0.9)")
    rows = [{"name": name, "distance": 1.0} for name in ("monolith", *names, "my_function")]
    text = Page.of(whole.compare(rows=rows)).text()
    for words in (*(Routing.named(name).describe() for name in names), "my_function"):
        assert words in text, words


def test_an_expert_has_one_colour_everywhere(page: Page):
    style = "".join(page.texts["style"])
    for number in range(4):
        assert style.count(f".e{number} {{ --c: var(--e{number}) }}") == 1
        assert len(page.with_class(f"e{number}")) > 15  # chips, strips, bars, cards and charts
    assert page.with_class("e4") == []
    for role in ("monolith", "router", "pretrain", "student", "own", "selected", "mixture"):
        assert f".{role} {{ --c: var(--{role}); }}" in style
        assert len(re.findall(f"--{role}: #", style)) == 2, "one on light and one on dark"


# Files of another form.


COMPARED = b'{"format": "atoll/comparison 1", "rows": [], "metric": {}, "prompts": ["a"], "clusters": []}'
DIAGNOSED = b'{"format": "atoll/diagnosis 1", "settings": {"splits": []}, "tables": []}'


@pytest.mark.parametrize(
    ("key", "content", "words"),
    [
        ("reports/compare.json", b'{"format": "atoll/comparison 7"}', "atoll/comparison 7, this"),
        ("reports/diagnostics.json", b'{"format": "atoll/diagnosis 5"}', "atoll/diagnosis 5, this Atoll"),
        ("partition/partition.json", b'{"format": "atoll/partition 2"}', "atoll/partition 2, this Atoll"),
        ("reports/compare.json", b"{", ""),
        ("reports/compare.json", b"[]", ""),
        ("reports/compare.json", b'{"format": "atoll/comparison 1", "rows": 5}', ""),
        ("reports/compare.json", COMPARED, ""),
        ("reports/stages.json", b"7", ""),
        ("reports/diagnostics.json", DIAGNOSED, ""),
        ("reports/evaluate/x.json", b'{"format": "atoll/point 1"}', ""),
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
    spent = {"monolith": 340 * 64 * 3e8, "experts": sum(cards), "router": 50 * 64 * 1e6, "pretrain": 0.0}
    ratios = {"once": 0.9, "top-1": 0.95, "top-2": 0.85, "full": 1.15, "oracle": 0.75}
    expected = {"format": "atoll/summary 1", "campaign": "camp", "atoll": "0.1.0", "seconds": 105.8}
    expected |= {"stages": {"data ingest": 4.5, "partition": 1.25, "launch": 100.0}, "images": 3500}
    expected |= {"partition": "ab" * 32, "cluster_sizes": [1000, 900, 800, 700]}
    expected |= {"cluster_heldout": [10, 20, 30, 40], "train_flops": spent, "ratio_to_monolith": ratios}
    expected |= {"flops_ratio": pytest.approx(1.0 + 50 * 1e6 / (340 * 3e8)), "distance": DISTANCES}
    expected |= {"best": "top-2", "default": "once", "metric": METRIC | {"steps": 6}}
    assert figures == expected | {"compared": {}, "unfinished": []}
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
    assert "Experts, router and shared pretraining together take 1.250× the monolith’s training FLOPs" in text
    assert "router and shared pretraining included" in text and "Experts + router + pretraining" in text


def test_a_student_stands_beside_the_ensemble_and_not_in_it(builder: Builder):
    builder.campaign().partition().plan("student", 340, batch=16, flops=4e8)
    rows = [{"name": n, "distance": 3.0 + i} for i, n in enumerate(("monolith", "student", "once"))]
    before = summary(builder.train().compare(rows=rows))
    assert before["unfinished"] == ["student"] and before["train_flops"]["student"] is None
    card = builder.run("student").store.get_json("student/expert/card.json")
    builder.store.put_json("student/expert/card.json", card | {"sampling": {"guidance": 1.0, "steps": 4}})
    text, figures = Page.of(builder).text(), summary(builder)
    assert figures["train_flops"]["student"] == 340 * 16 * 4e8
    assert figures["flops_ratio"] == before["flops_ratio"] and figures["best"] == "once"
    assert figures["ratio_to_monolith"] == {"student": 4 / 3, "once": 5 / 3}
    assert "for 0.333× the monolith’s training FLOPs, its teachers’ forward passes included" in text
    assert "one network distilled from the experts; sampled with guidance 1, steps 4" in text


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


# What was measured beyond the comparison.


def test_what_was_not_measured_is_not_told_and_one_protocol_is_no_warning(whole: Builder):
    figures = summary(whole.evaluate("aa", "ensemble", 417.25))
    assert figures["compared"] == {} and figures["default"] == "once"
    text = Page.of(whole.evaluate("bb", "monolith", 542.0, "cd" * 32, routing=None, seed=1)).text()
    assert "1,000 images against 1,512" in text and "monolith*" not in text
    assert "do not compare numbers across tables" not in text
    assert "At the end of the range" not in Page.of(whole.beyond(best=None)).text()


def test_all_that_was_measured_is_shown(swept: Builder):
    """Sweeps, pairs and a curve; a table for every protocol; tables that other stages left."""
    swept.evaluate("aa", "ensemble", 417.25)
    swept.evaluate("bb", "monolith", 542.0, "00" * 32, routing=None, seed=1)
    tree = swept.store.get_json("reports/evaluate/bb.json")
    tree["values"] = dict(reversed(tree["values"].items()))  # as they were asked for: kid, frechet
    swept.store.put_json("reports/evaluate/bb.json", tree)
    swept.evaluate("cc", "<b>ours</b>", 3.5, samples=50)
    swept.store.put_json("reports/evaluate/dd.json", {"format": "atoll/point 9"})
    swept.store.put_json("reports/evaluate/references/ee.json", {"format": "atoll/statistics 1"})
    heads, rows = ["of", "rows", "top words"], [["<i>x", 3, None], ["y", 0.123456, "dog, cat"]]
    ReportTable(title="Concepts", text="Two.", columns=heads, rows=rows).write(swept.store, "concepts")
    shown = Page.of(swept)
    shown.is_as_recorded("measured")
    # Words stand at the left of their column, and a phone shows the table as one, not as a block a row.
    assert '<th scope="col" class="num">rows</th><th scope="col">top words</th>' in shown.html
    assert 'data-label="top words"' not in shown.html
    tables = summary(swept)["compared"]
    best = [(row["model"], row["guidance"], row["ratio"]) for row in tables["best"]]
    assert best == [("monolith", 3.0, None), ("once", 1.0, 0.842)]
    assert tables["reach"][0]["of_monolith"] == 0.9375


CUT = "partition.method=random partition.k=2 condition=none network.family=dit"
SETS = [f"--set={setting}" for setting in CUT.split()]
HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"


@pytest.fixture
def campaign(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    root = tmp_path / "pictures"
    root.mkdir()
    for n in range(20):
        picture = Image.new("RGB", (20 + n, 30), (12 * n, 200, 90))
        picture.putpixel((n, n), (0, 0, 0))
        picture.save(root / f"{n:02d}.png")
    shutil.copy(root / "00.png", root / "again.png")
    (root / "bad.png").write_bytes(b"none")
    names = sorted(path.name for path in root.iterdir())
    texts = {"00.png": HOSTILE, "03.png": " "}
    lines = [json.dumps({"file_name": name, "text": texts.get(name, "a plate")}) for name in names]
    (root / "metadata.jsonl").write_text("\n".join(lines))
    made = tmp_path / "mine"
    sets = [f"data.source={root}", "data.ingest.size=16", "data.ingest.heldout=0.2", "data.ingest.mode=rgb"]
    assert command(capsys, "new", made, *(part for one in sets for part in ("--set", one))).code == 0
    refused(command(capsys, "data", "show", made), "no data set")
    assert command(capsys, "data", "ingest", made).code == 0
    return made


def test_a_page_shows_rows_rejects_and_duplicates(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = campaign / "reports/data.html"
    assert command(capsys, "data", "show", campaign, "--page", page).code == 0
    text = page.read_text()
    assert "Not searched yet" in text and "atoll data embed" not in text
    assert command(capsys, "data", "dedupe", campaign).code == 0
    shown = command(capsys, "data", "show", campaign, "--page", page)
    assert "\x1b" not in shown.out and "\u202e" not in shown.out
    text = page.read_text()
    assert "<script" not in text and "&lt;script&gt;alert(1)" in text and "\x1b" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert "left out; right: kept" in text and "Nearest to the thresholds" in text
    # Of the two rejects one is a picture without a caption, which the source still has.
    rejects = text[text.index('id="rejects"') : text.index('id="duplicates"')]
    assert rejects.count("<img") == 1 and rejects.count(">none<") == 1 and "03.png" in rejects
    assert text.count("<img") > 20


def test_a_card_is_what_a_hub_and_its_client_read(
    campaign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its metadata name licence, size and files; below stands what was cleaned and cut."""
    for argv in (["data", "dedupe"], ["data", "encode"], ["partition"]):
        assert command(capsys, *argv, campaign, *SETS).code == 0
    shown = command(capsys, "data", "show", campaign, "--card")
    assert shown.out.splitlines()[-1] == f"wrote {campaign}/data/README.md"
    text = (campaign / "data/README.md").read_text()
    head, body = yaml.safe_load(text.split("---\n")[1]), text.split("---\n", 2)[2]
    assert head["license"] == "unknown" and head["size_categories"] == ["n<1K"]
    for words in (
        "1 left out: unreadable",
        "1 left out: empty caption",
        "duplicates of other rows have weight 0",
        "| 1 | ",
    ):
        assert words in body, words
    assert "<script" not in text and "\x1b" not in text
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = datasets.load_dataset(str(campaign / "data"), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(rows) == 20 and rows[1]["png"].size and rows[1]["txt"] == "a plate"


def test_damage_is_told_on_the_page(campaign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = campaign / "data/images/00000.tar"
    images.write_bytes(images.read_bytes()[:4000])
    (campaign / "data/columns/split/00000.safetensors").write_bytes(b"none")
    page = campaign / "data.html"
    assert command(capsys, "data", "show", campaign, "--page", page).code == 0
    text = page.read_text()
    assert "no readable images" in text and "damaged" in text
    refused(command(capsys, "data", "show", campaign, "--page", campaign / "data"), "give another --page")


def test_bars_are_numbers_or_ranges() -> None:
    few, wide = Histogram({1: 4, 3: 1}), Histogram(dict.fromkeys(range(1, 2000), 1))
    assert bars(few) == [("1: 4 rows", 1.0), ("3: 1 rows", 0.5)]
    ranges = bars(wide, most=10)
    assert len(ranges) == 10 and ranges[-1][1] == 1 and ranges[0][1] < 0.2
