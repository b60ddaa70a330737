import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from atoll.base.errors import DataError
from atoll.data.audit import audit
from atoll.data.dataset import DataSet
from atoll.data.formats import Reject
from atoll.data.glyphs import GlyphSource
from atoll.data.images import safe_id
from atoll.data.ingest import ingest
from atoll.data.records import Record
from atoll.data.samples import read_labels
from atoll.data.settings import GlyphOptions, IngestConfig
from atoll.data.sources import open_source
from atoll.store.store import Store

CONFIG = IngestConfig(size=8, shard_rows=16, heldout=0.3)


class Rows:
    """A source of given records."""

    def __init__(self, rows: list[Record | Reject], name: str = "rows") -> None:
        self.rows, self.name = rows, name

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "fingerprint": self.name, "licence": "none"}

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        return iter(self.rows[start:stop])


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_the_layout(glyphs: DataSet, tmp_path: Path) -> None:
    folder = tmp_path / "store" / "glyphs"
    shards = [f"{n:05d}" for n in range(3)]
    expected = {f"rows/{n}.parquet" for n in shards} | {f"images/{n}.tar" for n in shards}
    expected |= {f"columns/split/{n}.safetensors" for n in shards}
    assert set(tree(folder)) == expected | {"columns/split/column.json", "rejects.jsonl", "manifest.json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["rows"], manifest["mode"], manifest["size"]) == (
        "atoll/dataset 1",
        40,
        "gray",
        8,
    )
    assert manifest["source"]["name"] == "glyphs"
    assert audit(glyphs) == []
    with tarfile.open(folder / "images/00000.tar") as tar:
        members = tar.getmembers()
        assert [m.name for m in members[:3]] == [f"{glyphs.ids[0]}.{kind}" for kind in ("png", "txt", "json")]
        assert {(m.mtime, m.uid, m.gid, m.uname) for m in members} == {(0, 0, 0, "")}
        text = tar.extractfile(members[1])
        assert text is not None
        assert text.read().decode() == glyphs.table(["caption"]).column("caption")[0].as_py()


def test_rows_tell_the_source(store: Store, folder: Path) -> None:
    options = IngestConfig(size=8, label="kind", group="who", heldout=0.4)
    dataset = ingest(open_source(folder, options), store, "d", options)
    row = dataset.table().to_pylist()[4]
    assert (row["caption"], row["label"], row["group"]) == ("picture 4", 1, "g2")
    assert (row["width"], row["height"], row["key"]) == (20, 12, "more/4.png")
    assert len(row["sha256"]) == 64
    assert dataset.image(4).size == (8, 8)
    assert dataset.manifest.mode == "rgb"
    assert len(list(dataset.iter_images(0))) == 6


def test_bad_rows_are_counted_and_named_and_never_fatal(
    store: Store, folder: Path, tmp_path: Path, picture: Callable[..., bytes]
) -> None:
    (folder / "0.png").write_bytes((folder / "0.png").read_bytes()[:100])
    (folder / "1.jpg").write_text("I am text")
    with (folder / "metadata.jsonl").open("a") as file:
        file.write('{"file_name": "2.png", "text": "again"}\n')
        file.write('{"file_name": "../x.png", "text": "out"}\n')
        file.write('{"file_name": "3.jpg", "text": " \\u0000 \\n"}\n')
        file.write('{"file_name": "3.jpg", "text": "\\ud800"}\n')
    dataset = ingest(open_source(folder), store, "d", CONFIG)
    assert len(dataset) == 4
    expected = {
        "truncated": 1,
        "unreadable": 1,
        "duplicate id": 1,
        "unsafe path": 1,
        "empty caption": 1,
        "caption is not UTF-8": 1,
    }
    assert dataset.manifest.rejects == expected
    lines = [json.loads(line) for line in (tmp_path / "store/d/rejects.jsonl").read_text().splitlines()]
    assert len(lines) == 6
    assert {line["key"] for line in lines} >= {"0.png", "1.jpg", "2.png"}
    assert audit(dataset) == []


def test_hostile_captions_and_ids(store: Store, picture: Callable[..., bytes]) -> None:
    hostile = [
        "../../etc/passwd",
        "a/b",
        "a.b",
        "",
        "nul\0",
        "x" * 500,
        "emoji 🙂",
        "new\nline",
        "CON",
        "\udcff",
    ]
    captions = [
        "a\0b",
        "two\nlines",
        "x" * 100_000,
        "🙂" * 9,
        "<script>",
        "'; drop",
        "a\x1b[31m",
        "\u202eabc",
        "q",
        "z",
    ]
    rows: list[Record | Reject] = [
        Record(name, name, picture(seed=n), caption)
        for n, (name, caption) in enumerate(zip(hostile, captions, strict=True))
    ]
    dataset = ingest(Rows(rows), store, "d", CONFIG)
    found = dataset.table().to_pylist()
    assert len(found) == 10
    assert all(safe_id(row["id"]) == row["id"] for row in found)
    assert len({row["id"] for row in found}) == 10
    assert found[0]["caption"] == "a b"
    assert found[1]["caption"] == "two\nlines"
    assert len(found[2]["caption"]) == 100_000
    assert found[6]["caption"] == "a [31m"
    path = store.path("d/images/00000.tar")
    with tarfile.open(path) as tar:
        names = tar.getnames()
    assert len(names) == 30
    assert all(name.count(".") == 1 and "/" not in name and len(name) < 106 for name in names)


@pytest.mark.parametrize("length", [94, 95, 96, 100, 101])
def test_the_longest_ids(store: Store, picture: Callable[..., bytes], length: int) -> None:
    names = [letter * length for letter in "ab"]
    rows: list[Record | Reject] = [Record(n, n, picture(seed=k), "x") for k, n in enumerate(names)]
    dataset = ingest(Rows(rows), store, "d", CONFIG)
    assert dataset.ids == [safe_id(name) for name in names]
    assert (dataset.ids == names) == (length <= 95)
    assert max(map(len, dataset.ids)) <= 95
    with tarfile.open(store.path("d/images/00000.tar")) as tar:
        assert tar.getnames()[2] == f"{dataset.ids[0]}.json"
    assert audit(dataset) == []


def test_labels_stand_in_for_captions(
    store: Store, tmp_path: Path, picture: Callable[..., bytes], folder: Path
) -> None:
    """What the recipe imagenet ingests: pictures and labels."""
    images = [{"bytes": picture(seed=n), "path": "x.png"} for n in range(8)]
    pq.write_table(pa.table({"image": images, "label": [n % 3 for n in range(8)]}), tmp_path / "x.parquet")
    lines = [{"file_name": name, "label": n} for n, name in enumerate(["0.png", "1.jpg", "2.png"])]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = CONFIG.model_copy(update={"label": "label", "mode": "rgb"})
    for name, path, count in (("p", tmp_path / "x.parquet", 8), ("f", folder, 3)):
        dataset = ingest(open_source(path, config), store, name, config)
        found = dataset.table().to_pylist()
        assert [(row["caption"], row["label"]) for row in found] == [
            (str(n % 3), n % 3) for n in range(count)
        ]
        assert "empty caption" not in dataset.manifest.rejects
        assert read_labels(dataset).tolist() == [n % 3 for n in range(count)]


def test_finished_is_found_and_nothing_is_overwritten(store: Store, glyphs: DataSet, tmp_path: Path) -> None:
    source = GlyphSource(GlyphOptions(limit=40))
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("*")}
    again = ingest(source, store, "glyphs", CONFIG, lambda done, total: pytest.fail("worked"))
    assert again.ids == glyphs.ids
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("*")} == before
    with pytest.raises(DataError, match="another source or with other settings"):
        ingest(source, store, "glyphs", CONFIG.model_copy(update={"size": 9}))
    with pytest.raises(DataError, match="another source or with other settings"):
        ingest(GlyphSource(GlyphOptions(limit=41)), store, "glyphs", CONFIG)
    store.put("other/file.txt", b"mine")
    with pytest.raises(DataError, match="not empty"):
        ingest(source, store, "other", CONFIG)
    assert store.list("other") == ["other/file.txt"]


RUN = """
import sys
from atoll.data.settings import GlyphOptions
from atoll.data.glyphs import GlyphSource
from atoll.data.settings import IngestConfig
from atoll.data.ingest import ingest
from atoll.store.store import Store

class Slow(GlyphSource):
    def records(self, start, stop):
        import time
        for record in super().records(start, stop):
            time.sleep(0.02)
            yield record

config = IngestConfig(size=8, shard_rows=16, heldout=0.3)
ingest(Slow(GlyphOptions(limit=120)), Store.open(sys.argv[1]), "glyphs", config)
"""


def test_killed_and_run_again_gives_the_same_bytes(tmp_path: Path) -> None:
    source = GlyphSource(GlyphOptions(limit=120))
    whole, torn = (Store.open(tmp_path / name, create=True) for name in ("whole", "torn"))
    ingest(source, whole, "glyphs", CONFIG)
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, torn.location], env={**os.environ, "PYTHONPATH": "src"}
    )
    deadline = time.monotonic() + 60
    while not torn.exists("glyphs/rows/00002.json"):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(DataError, match="not a data set"):
        DataSet.open(torn, "glyphs")
    with pytest.raises(DataError, match="unfinished ingest"):
        ingest(source, torn, "glyphs", CONFIG.model_copy(update={"size": 9}))
    kept = torn.path("glyphs/rows/00000.parquet").stat().st_mtime_ns
    half = torn.path("glyphs/images/00001.tar")
    half.write_bytes(half.read_bytes()[:1000])  # a torn shard is written again, a sound one is kept
    dataset = ingest(source, torn, "glyphs", CONFIG)
    assert torn.path("glyphs/rows/00000.parquet").stat().st_mtime_ns == kept
    assert tree(tmp_path / "torn") == tree(tmp_path / "whole")
    assert audit(dataset) == []


def test_duplicates_are_found_across_a_restart(store: Store, picture: Callable[..., bytes]) -> None:
    names = ["a", "b", "c", "a", "d", "b"]
    rows: list[Record | Reject] = [Record(n, n, picture(seed=k), n) for k, n in enumerate(names)]

    class Broken(Rows):
        def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
            if start == 4:
                raise KeyboardInterrupt
            return super().records(start, stop)

    config = IngestConfig(size=4, mode="rgb", shard_rows=2, heldout=0.3)
    with pytest.raises(KeyboardInterrupt):
        ingest(Broken(rows), store, "d", config)
    dataset = ingest(Rows(rows), store, "d", config)
    assert dataset.ids == ["a", "b", "c", "d"]
    assert [shard.rows for shard in dataset.shards] == [2, 1, 1]
    assert dataset.manifest.rejects == {"duplicate id": 2}


def test_groups_never_straddle_and_order_does_not_count(store: Store, picture: Callable[..., bytes]) -> None:
    rows: list[Record | Reject] = [
        Record(f"r{n}", f"r{n}", picture(seed=n), "x", None, f"g{n % 40}") for n in range(200)
    ]
    forward = ingest(Rows(rows), store, "forward", CONFIG)
    backward = ingest(Rows(rows[::-1], "backward"), store, "backward", CONFIG)
    held = [{dataset.ids[row] for row in dataset.split("heldout")} for dataset in (forward, backward)]
    assert held[0] == held[1]
    assert 20 < len(held[0]) < 110
    assert len(held[0]) % 5 == 0
    assert len(forward.split("train")) + len(held[0]) == 200
    other = ingest(Rows(rows), store, "other", CONFIG.model_copy(update={"seed": 1}))
    assert {other.ids[row] for row in other.split("heldout")} != held[0]
    fewer = ingest(Rows(rows[:120], "fewer"), store, "fewer", CONFIG)  # every group, fewer rows of each
    assert {fewer.ids[row] for row in fewer.split("heldout")} == {
        name for name in held[0] if int(name[1:]) < 120
    }


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_both_sides_have_a_group(store: Store, picture: Callable[..., bytes], share: float) -> None:
    rows: list[Record | Reject] = [
        Record(f"r{n}", f"r{n}", picture(seed=n), "x", None, "ab"[n % 2]) for n in range(6)
    ]
    dataset = ingest(Rows(rows), store, "d", CONFIG.model_copy(update={"heldout": share}))
    assert (len(dataset.split("train")), len(dataset.split("heldout"))) == (3, 3)


def test_one_group_cannot_be_split(store: Store, picture: Callable[..., bytes]) -> None:
    rows: list[Record | Reject] = [Record(str(n), str(n), picture(seed=n), "x", None, "g") for n in range(3)]
    with pytest.raises(DataError, match="one group"):
        ingest(Rows(rows), store, "d", CONFIG)
    bad: list[Record | Reject] = [*rows[:1], Record("a", "a.png", b"text", "x", None, "h")]
    with pytest.raises(
        DataError, match=r"one group.*; 1 of 2 were rejected \(1 unreadable; the first: a.png"
    ):
        ingest(Rows(bad), store, "d", CONFIG)
    dataset = ingest(Rows(rows), store, "d", CONFIG.model_copy(update={"heldout": 0.0}))
    assert len(dataset.split("train")) == 3


def test_equal_pictures_fall_into_one_split(store: Store, picture: Callable[..., bytes]) -> None:
    rows: list[Record | Reject] = [Record(str(n), str(n), picture(seed=n // 4), "x") for n in range(80)]
    dataset = ingest(Rows(rows), store, "d", CONFIG)
    assert all(len([r for r in dataset.split("heldout") if r // 4 == k]) in (0, 4) for k in range(20))


def test_no_usable_row_leaves_no_trace(store: Store) -> None:
    rows: list[Record | Reject] = [Record("a", "a.png", b"text", "x"), Reject("b.png", "empty caption")]
    with pytest.raises(
        DataError, match=r"no usable rows in rows \(1 unreadable, 1 empty caption; the first: a.png"
    ):
        ingest(Rows(rows), store, "d", CONFIG)
    assert store.list("d") == []
    with pytest.raises(DataError, match="it is empty"):
        ingest(Rows([]), store, "d", CONFIG)


def test_modes(store: Store, picture: Callable[..., bytes]) -> None:
    gray: list[Record | Reject] = [
        Record(str(n), str(n), picture(kind="PNG", mode="L", seed=n), "x") for n in range(80)
    ]
    assert ingest(Rows(gray), store, "gray", CONFIG).image(0).mode == "L"
    forced = CONFIG.model_copy(update={"mode": "rgb"})
    assert ingest(Rows(gray), store, "rgb", forced).image(0).mode == "RGB"
    mixed = [*gray[:38], Record("late", "late", picture(), "x"), *gray[38:]]
    dataset = ingest(Rows(mixed, "mixed"), store, "mixed", CONFIG)
    assert dataset.manifest.rejects == {"colour in a gray data set": 1}
    forced = CONFIG.model_copy(update={"mode": "gray"})
    assert len(ingest(Rows(mixed, "mixed"), store, "forced", forced)) == 81
