"""Ingest: rows and pictures of any source, restartable, with every bad row named."""

import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import ConfigError, DataError
from atoll.data.contents import audit
from atoll.data.dataset import DataSet
from atoll.data.formats import Reject
from atoll.data.images import safe_id
from atoll.data.ingest import ingest
from atoll.data.settings import GlyphOptions, IngestConfig
from atoll.data.sources.glyphs import GlyphSource
from atoll.data.sources.record import Record
from atoll.data.sources.several import open_source
from atoll.store.store import Store
from helpers_data import encoded

CONFIG = IngestConfig(size=8, shard_rows=16, heldout=0.3)


class Rows:
    """A source of given records; it breaks off at one position."""

    def __init__(self, rows: Sequence[Record | Reject], name: str = "rows", ends: int | None = None) -> None:
        self.rows, self.name, self.ends = rows, name, ends

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "fingerprint": self.name, "licence": "none"}

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        if self.ends is not None and start >= self.ends:
            raise KeyboardInterrupt
        return iter(self.rows[start:stop])


def record(name: object, caption: str = "x", group: str | None = None, **picture: Any) -> Record:
    return Record(str(name), str(name), encoded(**picture), caption, None, group)


def tree(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def heldout(dataset: DataSet) -> set[str]:
    return {dataset.ids[row] for row in dataset.split("heldout")}


def test_the_layout(glyphs: DataSet, tmp_path: Path) -> None:
    folder = tmp_path / "store" / "glyphs"
    shards = [f"{n:05d}" for n in range(3)]
    expected = {f"rows/{n}.parquet" for n in shards} | {f"images/{n}.tar" for n in shards}
    expected |= {f"columns/split/{n}.safetensors" for n in shards}
    assert set(tree(folder)) == expected | {"columns/split/column.json", "rejects.jsonl", "manifest.json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    fields = [manifest[name] for name in ("format", "rows", "mode", "size")]
    assert fields == ["atoll/dataset 1", 40, "gray", 8]
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
    assert dataset.image(4).size == (8, 8) and dataset.manifest.mode == "rgb"


def test_bad_rows_are_counted_and_named_and_never_fatal(store: Store, folder: Path) -> None:
    (folder / "0.png").write_bytes((folder / "0.png").read_bytes()[:100])
    (folder / "1.jpg").write_text("I am text")
    with (folder / "metadata.jsonl").open("a") as file:
        file.write('{"file_name": "2.png", "text": "again"}\n')
        file.write('{"file_name": "../x.png", "text": "out"}\n')
        file.write('{"file_name": "3.jpg", "text": " \\u0000 \\n"}\n')
        file.write('{"file_name": "3.jpg", "text": "\\ud800"}\n')
    dataset = ingest(open_source(folder), store, "d", CONFIG)
    assert len(dataset) == 4 and audit(dataset) == []
    reasons = ["truncated", "unreadable", "duplicate id", "unsafe path", "empty caption"]
    assert dataset.manifest.rejects == dict.fromkeys([*reasons, "unreadable row"], 1)
    lines = [json.loads(line) for line in store.get("d/rejects.jsonl").splitlines()]
    assert len(lines) == 6 and {line["key"] for line in lines} >= {"0.png", "1.jpg", "2.png"}


def test_hostile_captions_and_ids(store: Store) -> None:
    names = ["../../etc/passwd", "a/b", "a.b", "", "nul\0", "emoji 🙂", "new\nline", "CON", "\udcff"]
    names += [letter * length for letter in "xy" for length in (95, 96, 500)]
    captions = ["a\0b", "two\nlines", "x" * 100_000, "🙂" * 9, "<script>", "a\x1b[31m", "\u202eabc"]
    captions += ["z"] * (len(names) - len(captions))
    rows = [record(name, text, seed=n) for n, (name, text) in enumerate(zip(names, captions, strict=True))]
    dataset = ingest(Rows(rows), store, "d", CONFIG)
    assert dataset.ids == [safe_id(name) for name in names] and len(set(dataset.ids)) == len(names)
    assert all(safe_id(name) == name and len(name) <= 95 for name in dataset.ids)
    assert [name for name in names if safe_id(name) == name] == ["CON", "x" * 95, "y" * 95]
    kept = dataset.table(["caption"]).column("caption").to_pylist()
    assert kept[:2] == ["a b", "two\nlines"] and len(kept[2]) == 100_000 and kept[5] == "a [31m"
    with tarfile.open(store.path("d/images/00000.tar")) as tar:
        members = tar.getnames()
    assert len(members) == 3 * len(names)
    assert all(name.count(".") == 1 and "/" not in name and len(name) <= 100 for name in members)
    assert audit(dataset) == []


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


def test_broken_off_and_run_again_gives_the_same_bytes(tmp_path: Path) -> None:
    """Ids that occurred before it broke off are known, a torn shard is written again, a sound one is kept."""
    rows = [record(n % 37, group=f"g{n % 11}", seed=n) for n in range(90)]
    whole, torn = (Store.open(tmp_path / name, create=True) for name in ("whole", "torn"))
    ingest(Rows(rows), whole, "d", CONFIG)
    with pytest.raises(KeyboardInterrupt):
        ingest(Rows(rows, ends=48), torn, "d", CONFIG)
    with pytest.raises(DataError, match="not a data set"):
        DataSet.open(torn, "d")
    with pytest.raises(DataError, match="unfinished ingest"):
        ingest(Rows(rows), torn, "d", CONFIG.model_copy(update={"size": 9}))
    kept = torn.path("d/rows/00000.parquet").stat().st_mtime_ns
    half = torn.path("d/images/00001.tar")
    half.write_bytes(half.read_bytes()[:1000])
    dataset = ingest(Rows(rows), torn, "d", CONFIG)
    assert torn.path("d/rows/00000.parquet").stat().st_mtime_ns == kept
    assert tree(tmp_path / "torn") == tree(tmp_path / "whole")
    assert len(dataset) == 37 and dataset.manifest.rejects == {"duplicate id": 53} and audit(dataset) == []


def test_groups_never_straddle_and_order_does_not_count(store: Store) -> None:
    rows = [record(f"r{n}", group=f"g{n % 40}", size=(8, 8), seed=n) for n in range(200)]
    forward = ingest(Rows(rows), store, "forward", CONFIG)
    backward = ingest(Rows(rows[::-1], "backward"), store, "backward", CONFIG)
    held = heldout(forward)
    assert heldout(backward) == held
    assert 20 < len(held) < 110 and len(held) % 5 == 0
    assert len(forward.split("train")) + len(held) == 200
    assert heldout(ingest(Rows(rows), store, "other", CONFIG.model_copy(update={"seed": 1}))) != held
    fewer = ingest(Rows(rows[:120], "fewer"), store, "fewer", CONFIG)  # every group, fewer rows of each
    assert heldout(fewer) == {name for name in held if int(name[1:]) < 120}


def test_test_rows_come_out_of_the_held_out_ones(store: Store) -> None:
    rows = [record(f"r{n}", group=f"g{n % 40}", size=(8, 8), seed=n) for n in range(200)]
    whole = ingest(Rows(rows), store, "whole", CONFIG)
    parted = ingest(Rows(rows), store, "parted", CONFIG.model_copy(update={"heldout": 0.2, "test": 0.1}))
    assert parted.split("train").tolist() == whole.split("train").tolist()
    held, test = (set(parted.split(name).tolist()) for name in ("heldout", "test"))
    assert held | test == set(whole.split("heldout").tolist()) and not held & test
    assert held and test and len(test) % 5 == 0
    assert audit(parted) == []
    with pytest.raises(ConfigError, match="leave nothing to train on"):
        IngestConfig(heldout=0.5, test=0.5)


def test_equal_pictures_fall_into_one_split(store: Store) -> None:
    dataset = ingest(Rows([record(n, seed=n // 4) for n in range(80)]), store, "d", CONFIG)
    assert all(len([r for r in dataset.split("heldout") if r // 4 == k]) in (0, 4) for k in range(20))


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_both_sides_have_a_group(store: Store, share: float) -> None:
    rows = [record(n, group="ab"[n % 2], seed=n) for n in range(6)]
    dataset = ingest(Rows(rows), store, "d", CONFIG.model_copy(update={"heldout": share}))
    assert (len(dataset.split("train")), len(dataset.split("heldout"))) == (3, 3)


def test_one_group_cannot_be_split(store: Store) -> None:
    rows = [record(n, group="g", seed=n) for n in range(3)]
    with pytest.raises(DataError, match="one group"):
        ingest(Rows(rows), store, "d", CONFIG)
    bad = [rows[0], Record("a", "a.png", b"text", "x", None, "h")]
    words = r"one group.*; 1 of 2 were rejected \(1 unreadable; the first: a.png"
    with pytest.raises(DataError, match=words):
        ingest(Rows(bad), store, "d", CONFIG)
    dataset = ingest(Rows(rows), store, "d", CONFIG.model_copy(update={"heldout": 0.0}))
    assert len(dataset.split("train")) == 3


def test_no_usable_row_leaves_no_trace(store: Store) -> None:
    rows = [Record("a", "a.png", b"text", "x"), Reject("b.png", "empty caption")]
    words = r"no usable rows in rows \(1 unreadable, 1 empty caption; the first: a.png"
    with pytest.raises(DataError, match=words):
        ingest(Rows(rows), store, "d", CONFIG)
    assert store.list("d") == []
    with pytest.raises(DataError, match="it is empty"):
        ingest(Rows([]), store, "d", CONFIG)


def test_modes(store: Store) -> None:
    def mode(name: str, rows: Sequence[Record], setting: str) -> DataSet:
        return ingest(Rows(rows, name), store, name, CONFIG.model_copy(update={"mode": setting}))

    gray = [record(n, mode="L", seed=n) for n in range(80)]
    assert mode("gray", gray, "auto").image(0).mode == "L"
    assert mode("rgb", gray, "rgb").image(0).mode == "RGB"
    mixed = [*gray[:38], record("late"), *gray[38:]]
    assert mode("mixed", mixed, "auto").manifest.rejects == {"colour in a gray data set": 1}
    assert len(mode("forced", mixed, "gray")) == 81
