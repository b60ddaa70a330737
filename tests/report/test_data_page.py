"""The page of a data set: hostile captions are texts, rejects are seen again, damage is told."""

import json
import shutil
from pathlib import Path

import datasets
import pytest
import yaml
from PIL import Image

from atoll.data.contents import Histogram
from atoll.report.data_page import bars
from helpers import command, refused

SETS = (
    "--set=partition.method=random",
    "--set=partition.k=2",
    "--set=condition=none",
    "--set=network.family=dit",
)
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
    assert [(one.name, one.height) for one in bars(few)] == [("1: 4 rows", 1.0), ("3: 1 rows", 0.5)]
    ranges = bars(wide, most=10)
    assert len(ranges) == 10 and ranges[-1].height == 1 and ranges[0].height < 0.2
