"""What a data set holds: of all its rows, half ingested, without pictures, and with damage."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from atoll.base.console import Progress
from atoll.base.errors import DataError
from atoll.data.contents import Histogram, contents, lines
from atoll.data.dataset import DataSet
from atoll.data.duplicates import dedupe, fingerprint_job
from atoll.data.settings import DedupeConfig, IngestConfig
from atoll.data.sources.several import open_source
from atoll.data.subsets import write_subset
from atoll.store.store import Store
from helpers_data import ingest

ROWS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of many sizes: one word is half of the captions, one picture is there twice, two are none."""
    root = tmp_path / "pictures"
    root.mkdir()
    named = []
    for n in range(ROWS):
        Image.new("RGB", (10 + n, 20), (6 * n, 255 - 6 * n, 90)).save(root / f"{n:02d}.png")
        named.append((f"{n:02d}.png", "flag" if n % 2 else f"picture {n} <b>"))
    shutil.copy(root / "00.png", root / "again.png")
    (root / "bad.png").write_bytes(b"none")
    named += [("again.png", "again"), ("bad.png", "bad"), ("01.png", " ")]
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in named]
    (root / "metadata.jsonl").write_text("\n".join(lines))
    return root


def ingested(folder: Path) -> Store:
    config = IngestConfig(size=8, shard_rows=10, heldout=0.2, licence="CC0-1.0")
    store = Store.open(folder.parent / "data", create=True)
    ingest(open_source(str(folder), config), store, "", config)
    return store


def test_everything_is_counted(folder: Path) -> None:
    store = ingested(folder)
    found = contents(store)
    assert found.finished and found.problems == [] and found.duplicates is None
    assert found.captions[0] == ("flag", ROWS // 2) and found.distinct == ROWS // 2 + 2
    assert found.licences == Counter({"CC0-1.0": ROWS + 1}) and not found.sources
    assert (min(found.widths), max(found.widths), found.heights) == (10, 49, {20: ROWS + 1})
    assert found.words == {1: ROWS // 2 + 1, 3: ROWS // 2} and found.words.quantile(0.5) == 1
    dedupe(DataSet.open(store), DedupeConfig(), "none")
    found = contents(store)
    assert found.duplicates is not None
    assert found.splits["of weight 0"] == found.duplicates[0] >= 1
    told = "\n".join(lines(found))
    assert "41 rows of folder pictures, 8 px rgb" in told
    assert "1 left out: unreadable" in told and "1 left out: empty caption" in told
    assert "20 times 'flag'" in told and "licence: CC0-1.0 41" in told and "column looks: uint8" in told
    assert "width" not in "\n".join(lines(contents(store, rows=False)))


def test_of_an_unfinished_ingest_what_there_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(self: Progress, done: int) -> None:
        if done >= 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "__call__", killed)
    with pytest.raises(KeyboardInterrupt):
        ingested(folder)
    monkeypatch.undo()
    found = contents(Store.open(folder.parent / "data"))
    assert not found.finished and len(found.dataset) == 20 == sum(found.words.values())
    with pytest.raises(DataError, match="is not a data set"):
        contents(Store.open(folder))


def test_damage_is_told_and_the_rest_counted(folder: Path) -> None:
    store = ingested(folder)
    fingerprint_job(DataSet.open(store)).run()
    data = folder.parent / "data"
    (data / "columns/looks/00001.safetensors").unlink()
    (data / "columns/split/column.json").write_text("{")
    rows = data / "rows/00002.parquet"
    rows.write_bytes(rows.read_bytes()[:-7])
    found = contents(store)
    assert sum(found.words.values()) == ROWS + 1 - 10 and found.splits == {}
    told = "\n".join(lines(found))
    assert "column split: damaged: " in told and "looks/00001.safetensors is missing" in told
    assert "00002.parquet" in told


def test_without_pictures_and_by_columns_that_only_some_have(folder: Path, tmp_path: Path) -> None:
    """An island's data have no pictures; `licence` and `source` are columns where the source has them."""
    dataset = DataSet.open(ingested(folder))
    part = write_subset(dataset, [3, 5, 8], Store.open(tmp_path / "part", create=True), "", ["split"])
    found = contents(part.store)
    assert found.bytes("images") == 0 and sum(found.licences.values()) == 3


def test_the_frequent_are_found_among_many(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """At most twice as many captions as `COUNTED` says are held at a time, and yet numbers are exact."""
    monkeypatch.setattr("atoll.data.contents.COUNTED", 5)
    found = contents(ingested(folder))
    assert found.captions[0] == ("flag", ROWS // 2) and found.distinct == ROWS // 2 + 2


def test_quantiles() -> None:
    tally = Histogram()
    tally.add([5, 1, 1, 9])
    assert [tally.quantile(share) for share in (0, 0.5, 0.75, 1)] == [1, 1, 5, 9]
