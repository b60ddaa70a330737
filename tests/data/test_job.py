"""A job in parts: whoever writes which shard, and whoever is lost, the bytes are the same."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.base.errors import ConfigError, DataError
from atoll.data.contents import audit
from atoll.data.dataset import DataSet
from atoll.data.formats import Reject
from atoll.data.ingest import IngestJob, ingest
from atoll.data.job import Part
from atoll.data.sources.record import Record
from atoll.store import local
from atoll.store.store import Store
from data.test_ingest import CONFIG, Rows, record, tree


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
    settled = 6  # shards that hold ids of earlier ones, and are written again
    assert len(made) == settled + (lost is not None)
    work(1)  # after the end a part costs a look
    assert tree(tmp_path / "store") == tree(serial)


def test_parts_of_a_column(glyphs: DataSet) -> None:
    calls = list[int]()

    def compute(shard: int) -> dict[str, Tensor]:
        calls.append(shard)
        return {"values": torch.full((glyphs.shards[shard].rows,), shard)}

    glyphs.column_job("x", {}, compute).write_part(Part(1, 2))
    assert calls == [1] and not glyphs.has_column("x")
    glyphs.column_job("x", {}, compute).run()
    glyphs.column_job("x", {}, compute).write_part(Part(0, 1))
    assert calls == [1, 0, 2] and glyphs.column("x").read([0, 20, 39]).tolist() == [0, 1, 2]


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
    def values(shard: int) -> dict[str, Tensor]:
        return {"values": torch.zeros(glyphs.shards[shard].rows)}

    def behind(shard: int) -> dict[str, Tensor]:
        assert shard == 0
        DataSet.open(glyphs.store, "glyphs").write_column("x", {}, values)
        return values(shard)

    glyphs.write_column("x", {}, behind)
    assert glyphs.column("x").read([39]) == 0
    assert not [path for path in tree(tmp_path) if "columns/x/" in path and path.endswith("0.json")]


def test_what_killed_writers_left_goes(glyphs: DataSet) -> None:
    """The passing file of a dead process stands in a folder that the stage sweeps."""

    def make() -> None:
        glyphs.write_column("x", {}, lambda n: {"values": torch.zeros(glyphs.shards[n].rows)})

    make()
    for again in (glyphs.tidy, make):
        left = Path(glyphs.store.location, f"glyphs/columns/x/{local._writer(2**22 + 1)}000000")
        left.touch()
        again()
        assert not left.exists()


def test_a_folder_of_another_source_is_left_alone(store: Store) -> None:
    ingest(Rows(repeated()), store, "d", CONFIG)
    for work in (IngestJob.run, lambda job: job.write_part(Part(0, 2))):
        with pytest.raises(DataError, match="another source"):
            work(IngestJob(Rows(repeated(), "other"), store, "d", CONFIG))
