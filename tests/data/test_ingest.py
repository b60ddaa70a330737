"""Ingest: rows and pictures of any source, restartable, in parts, with every bad row named."""

import json
import random
import tarfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.base.errors import ConfigError, DataError
from atoll.base.part import Part
from atoll.data.contents import audit
from atoll.data.dataset import DataSet
from atoll.data.formats import Reject
from atoll.data.ingest import IngestJob, safe_id
from atoll.data.settings import GlyphOptions, IngestConfig
from atoll.data.sources.glyphs import GlyphSource
from atoll.data.sources.record import Record
from atoll.data.sources.several import open_source
from atoll.store import local
from atoll.store.store import Store
from helpers_data import encoded, ingest

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
    assert ingest(source, store, "glyphs", CONFIG).ids == glyphs.ids
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "store").rglob("*")} == before
    with pytest.raises(DataError, match="another source or with other settings"):
        ingest(source, store, "glyphs", CONFIG.model_copy(update={"size": 9}))
    other = IngestJob(GlyphSource(GlyphOptions(limit=41)), store, "glyphs", CONFIG)
    for work in (other.run, lambda: other.write_part(Part(0, 2))):
        with pytest.raises(DataError, match="another source or with other settings"):
            work()
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
    held = heldout(forward)
    assert heldout(ingest(Rows(rows[::-1], "backward"), store, "backward", CONFIG)) == held
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
    for seed in range(6):  # whose lowest group may lie above the share
        alone = CONFIG.model_copy(update={"heldout": 0.0, "test": 0.01, "seed": seed})
        dataset = ingest(Rows(rows), store, f"alone{seed}", alone)
        assert len(dataset.split("test")) and not len(dataset.split("heldout"))
        both = alone.model_copy(update={"heldout": 0.05, "test": 0.05})
        assert all(map(len, map(ingest(Rows(rows), store, f"b{seed}", both).split, ("heldout", "test"))))


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
    for count, words in (
        (3, "3 rows of one group.*choose another data.ingest.group"),
        (1, "1 row of .* give more"),
    ):
        with pytest.raises(DataError, match=words):
            ingest(Rows(rows[:count]), store, "d", CONFIG)
    bad = [rows[0], Record("a", "a.png", b"text", "x", None, "h")]
    words = r"one group.*; 1 of 2 were rejected \(unreadable: 1; the first: a.png"
    with pytest.raises(DataError, match=words):
        ingest(Rows(bad), store, "d", CONFIG)
    assert len(ingest(Rows(rows), store, "d", CONFIG.model_copy(update={"heldout": 0.0})).split("train")) == 3


def test_no_usable_row_leaves_no_trace(store: Store) -> None:
    rows = [Record("a", "a.png", b"text", "x"), Reject("b.png", "empty caption")]
    words = r"no usable rows in rows \(unreadable: 1, empty caption: 1; the first: a.png"
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


# A job in parts: whoever writes which shard, and whoever is lost, the bytes are the same.


def repeated(count: int = 120) -> list[Record | Reject]:
    """Rows whose ids repeat within and across shards, some of them without a picture or a caption."""
    chance, rows = random.Random(3), list[Record | Reject]()
    for number in range(count):
        name = f"r{chance.randrange(count // 2)}" if not 32 <= number < 48 else f"r{number % 5}"
        picture = b"text" if chance.random() < 0.3 else record(name, seed=number).image
        caption = "" if chance.random() < 0.1 else "x"
        rows.append(Record(name, f"{number}", picture, caption, None, f"g{number % 7}"))
    rows[:5] = [record(f"r{number}", seed=number) for number in range(5)]  # shard 2 has ids of shard 0 alone
    return rows


@pytest.fixture(scope="module")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("serial")
    ingest(Rows(repeated()), Store.open(root), "d", CONFIG)
    return root


def test_ids_are_settled_as_if_there_were_one_shard(serial: Path, store: Store) -> None:
    """A row of a known id is rejected for that, even where its picture is broken too."""
    many = DataSet.open(Store.open(serial), "d")
    one = ingest(Rows(repeated()), store, "d", CONFIG.model_copy(update={"shard_rows": 1000}))
    assert len(many.shards) == 7 and many.manifest.rejects["duplicate id"] > 30  # one of 8 has no row
    assert many.table().to_pylist() == one.table().to_pylist()
    assert many.store.get("d/rejects.jsonl") == store.get("d/rejects.jsonl")
    assert audit(many) == []
    assert "d/images/00002.tar" not in many.store.list("d")


@pytest.mark.parametrize(("total", "lost"), [(1, None), (3, None), (3, 1), (20, 7)])
def test_parts_make_the_data_set_though_one_is_lost(
    serial: Path, store: Store, total: int, lost: int | None, tmp_path: Path
) -> None:
    """Tasks of an array count from 1; who finishes writes what is missing, and nothing else."""

    def work(number: int) -> None:
        job = IngestJob(Rows(repeated(), ends=80 if number == lost else None), store, "d", CONFIG)
        try:
            job.write_part(Part.parse(f"{number}/{total}"))
        except KeyboardInterrupt:
            assert number == lost

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(1, total + 1)))
    assert not store.exists("d/manifest.json")
    source, made = Rows(repeated()), list[int]()
    source.records = lambda start, stop: made.append(start) or Rows.records(source, start, stop)  # type: ignore[method-assign,assignment]
    ingest(source, store, "d", CONFIG)
    assert tree(tmp_path / "store") == tree(serial)
    assert len(made) == 6 + (lost is not None)  # 6 hold ids of earlier ones, and are written again
    work(1)  # after the end a part costs a look
    assert tree(tmp_path / "store") == tree(serial)


@pytest.mark.parametrize("text", ["", "1", "1/0", "0x1/2", "-1/2", "1/2/3", "a/b"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="write I/N, such as 2/8"):
        Part.parse(text)


class Hanging(Rows):
    """A source that does something before its shard at position 64 is read."""

    before: Callable[[], object]

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        if start == 64:
            self.before()
        return super().records(start, stop)


@pytest.mark.parametrize("part", [None, Part(0, 2)])
def test_a_process_that_hung_changes_nothing(
    serial: Path, store: Store, tmp_path: Path, part: Part | None
) -> None:
    """Another one settled the ids and finished; what it then would write is known to be too late."""
    source, reached, go_on = Hanging(repeated()), threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        assert go_on.wait(20)

    def work() -> None:
        job = IngestJob(source, Store.open(tmp_path / "store"), "d", CONFIG)
        job.run() if part is None else job.write_part(part)

    source.before = hang
    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(work)
        assert reached.wait(20)
        ingest(Rows(repeated()), store, "d", CONFIG)
        finished = tree(tmp_path / "store")
        go_on.set()
        hung.result(20)
    assert tree(tmp_path / "store") == finished == tree(serial)


def test_a_folder_that_was_emptied_meanwhile_is_told(store: Store) -> None:
    source = Hanging(repeated())
    source.before = lambda: store.delete(*store.list("d"))
    with pytest.raises(DataError, match="taken by another process: run the command again"):
        ingest(source, store, "d", CONFIG)


def test_a_column_that_another_process_finished_is_left_alone(glyphs: DataSet, tmp_path: Path) -> None:
    def behind(shard: int) -> dict[str, Tensor]:
        assert shard == 0
        DataSet.open(glyphs.store, "glyphs").write_values("x", {}, np.zeros(len(glyphs), np.float32))
        return {"values": torch.zeros(glyphs.shards[shard].rows)}

    glyphs.write_column("x", {}, behind)
    assert glyphs.column("x").read([39]) == 0
    assert not [path for path in tree(tmp_path) if "columns/x/" in path and path.endswith("0.json")]


def test_what_killed_writers_left_goes(glyphs: DataSet) -> None:
    """The passing file of a dead process stands in a folder that the stage sweeps."""
    zeros = np.zeros(len(glyphs))
    glyphs.write_values("x", {}, zeros)
    for again in (glyphs.tidy, lambda: glyphs.write_values("x", {}, zeros)):
        left = Path(glyphs.store.location, f"glyphs/columns/x/{local._writer(2**22 + 1)}000000")
        left.touch()
        again()
        assert not left.exists()
