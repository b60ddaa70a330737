"""Several workers at one stage: whoever writes which shard, and whoever dies, the bytes are the same."""

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.base.errors import DataError
from atoll.data.audit import audit
from atoll.data.column_stage import ColumnStage
from atoll.data.columns import Compute
from atoll.data.dataset import DataSet
from atoll.data.formats import Reject
from atoll.data.ingest import ingest
from atoll.data.records import Record
from atoll.data.workers import work_together
from atoll.store import local
from atoll.store.claims import Claims
from atoll.store.lease import LeaseConfig
from atoll.store.store import Store
from data.test_ingest import CONFIG, Rows, record, tree

LEASE = LeaseConfig(heartbeat_seconds=0.05, expiry_seconds=0.4)


def repeated(count: int = 120) -> list[Record | Reject]:
    """Rows whose ids repeat within and across shards, some of them without a picture or a caption."""
    chance, rows = random.Random(3), list[Record | Reject]()
    for number in range(count):
        name = f"r{chance.randrange(count // 2)}" if not 32 <= number < 48 else f"r{number % 5}"
        picture = b"text" if chance.random() < 0.3 else record(name, seed=number).image
        caption = "" if chance.random() < 0.1 else "x"
        rows.append(Record(name, f"{number}", picture, caption, None, f"g{number % 7}"))
    rows[:5] = [
        record(f"r{number}", seed=number) for number in range(5)
    ]  # so shard 2 has ids of shard 0 alone
    return rows


class Slow(Rows):
    """A source that waits before every shard."""

    def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
        time.sleep(0.02)
        return super().records(start, stop)


@pytest.fixture
def serial(tmp_path: Path) -> Path:
    ingest(Rows(repeated()), Store.open(tmp_path / "serial", create=True), "d", CONFIG)
    return tmp_path / "serial"


def test_a_worker_that_is_behind_computes_nothing_again(store: Store) -> None:
    """Whoever finishes removes the notes of all shards, while another one still goes through its list."""
    config, reads = CONFIG.model_copy(update={"mode": "rgb"}), list[int]()

    class Behind(Rows):
        def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
            reads.append(start)
            if len(reads) == 1:
                ingest(Rows(repeated()), store, "d", config)
            return super().records(start, stop)

    ingest(Behind(repeated()), store, "d", config, lease=LEASE)
    assert len(reads) == 1 and not audit(DataSet.open(store, "d"))


def test_what_is_there_is_not_claimed(glyphs: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that others wrote since the look at what is missing cost a look, and no claim."""
    claimed, claim = list[str](), Claims.claimed
    monkeypatch.setattr(Claims, "claimed", lambda self, part: claimed.append(part) or claim(self, part))

    def stage(compute: Compute) -> ColumnStage:
        place = (glyphs.store, "glyphs/columns/x", glyphs.shards)
        return ColumnStage(*place, {"name": "x"}, compute, {}, "fixed", None)

    def values(shard: int) -> dict[str, Tensor]:
        return {"values": torch.zeros(glyphs.shards[shard].rows)}

    def behind(shard: int) -> dict[str, Tensor]:
        for number in range(1, len(glyphs.shards)):
            stage(values).write(number)
        return values(shard)

    work_together(stage(behind), LEASE)
    assert claimed == ["00000", "finish"]


def test_ids_are_settled_as_if_there_were_one_shard(serial: Path, store: Store) -> None:
    """A row of a known id is rejected for that, even where its picture is broken too."""
    many = DataSet.open(Store.open(serial), "d")
    one = ingest(Rows(repeated()), store, "d", CONFIG.model_copy(update={"shard_rows": 1000}))
    assert len(many.shards) == 7 and many.manifest.rejects["duplicate id"] > 30  # one of 8 has no row
    assert many.table().to_pylist() == one.table().to_pylist()
    assert many.store.get("d/rejects.jsonl") == store.get("d/rejects.jsonl")
    assert audit(many) == []
    assert "d/images/00002.tar" not in many.store.list("d")


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_share_an_ingest(serial: Path, store: Store, workers: int, tmp_path: Path) -> None:
    def work(_: int) -> DataSet:
        return ingest(Slow(repeated()), Store.open(tmp_path / "store"), "d", CONFIG, lease=LEASE)

    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(work, range(workers)))
    assert tree(tmp_path / "store") == tree(serial)
    assert len({dataset.id_hash for dataset in found}) == 1


@pytest.mark.parametrize("ended", [True, False])
def test_a_claim_of_a_dead_worker_is_taken_over(
    serial: Path, store: Store, tmp_path: Path, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once where its process is known to have ended, else after its silence, by no clock of ours."""
    source = Rows(repeated(), ends=64)
    with pytest.raises(KeyboardInterrupt):
        ingest(source, store, "d", CONFIG, lease=LEASE)
    left = Claims(store, "d/claims", LEASE)
    left.claim = left.claim.model_copy(
        update={"process": left.claim.process.model_copy(update={"pid": 2**22 + 1 if ended else os.getpid()})}
    )
    for part in ("00004", "finish"):
        store.create_json(f"d/claims/{part}.3.json", left.claim.to_json())
    monkeypatch.setattr(time, "time", lambda: 0.0)
    start = time.monotonic()
    ingest(Rows(repeated()), store, "d", CONFIG, lease=LeaseConfig(expiry_seconds=1e4) if ended else LEASE)
    assert ended or time.monotonic() - start > 0.3
    assert tree(tmp_path / "store") == tree(serial)


def test_workers_killed_as_they_ask_the_store_for_the_time_leave_nothing(
    glyphs: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passing file of one stands in a folder that the stage sweeps, and also where others finish it."""
    now, left = local.now, list[Path]()

    def killed(folder: Path) -> float:
        left.append(folder / f"{local._writer(2**22 + 1)}000000")
        left[-1].touch()
        return now(folder)

    def make() -> None:
        glyphs.write_column("x", {}, lambda n: {"values": torch.zeros(glyphs.shards[n].rows)}, lease=LEASE)

    silent = Claims(glyphs.store, "glyphs/columns/x/claims", LEASE).claim.to_json()
    silent["process"]["machine"] = "another"
    glyphs.store.create_json("glyphs/columns/x/claims/00000.0.json", silent)
    monkeypatch.setattr(local, "now", killed)
    for again in (glyphs.tidy, make):
        make()
        left[-1].touch()
        again()
        assert not any(one.exists() for one in left)


def test_a_living_claim_is_left_alone_and_beats(store: Store) -> None:
    one, other = (Claims(store, "claims", LEASE) for _ in range(2))
    with one.claimed("a") as mine:
        assert mine
        for _ in range(3):
            time.sleep(0.25)
            with other.claimed("a") as taken:
                assert not taken
        with other.claimed("b") as taken:
            assert taken
    assert store.list("claims") == []


def test_a_worker_that_hung_changes_nothing(serial: Path, store: Store, tmp_path: Path) -> None:
    """Others took its claim, settled the ids and finished; what it then writes is known to be too late."""
    reached, go_on = threading.Event(), threading.Event()

    class Hanging(Rows):
        def records(self, start: int, stop: int) -> Iterator[Record | Reject]:
            if start == 64:
                reached.set()
                assert go_on.wait(20)
            return super().records(start, stop)

    with ThreadPoolExecutor(1) as pool:
        hung = pool.submit(ingest, Hanging(repeated()), Store.open(tmp_path / "store"), "d", CONFIG)
        assert reached.wait(20)
        ingest(Rows(repeated()), store, "d", CONFIG, lease=LEASE)
        finished = tree(tmp_path / "store")
        go_on.set()
        hung.result(20)
    assert tree(tmp_path / "store") == finished == tree(serial)


def test_a_folder_of_another_source_is_left_alone_by_all(store: Store) -> None:
    ingest(Rows(repeated()), store, "d", CONFIG, lease=LEASE)
    with pytest.raises(DataError, match="another source"):
        ingest(Rows(repeated(), "other"), store, "d", CONFIG, lease=LEASE)
