import io
import multiprocessing
import os
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from torch import Tensor

from atoll.base.errors import DataError, StoreError
from atoll.base.part import Part
from atoll.data.columns import Column, describe, ragged
from atoll.data.contents import audit
from atoll.data.dataset import DataSet
from atoll.data.encode import captions_of
from atoll.data.formats import Shard
from atoll.data.job import ColumnJob
from atoll.data.subsets import union, write_subset
from atoll.store.manifest import write_file
from atoll.store.store import Store
from helpers import flip

PRODUCER = {"name": "test", "hash": "1", "scale": 0.5}


class Counting:
    """Values that say which row they belong to, and how often they were computed; it may die at a shard."""

    def __init__(
        self, dataset: DataSet, add: float = 0.0, ragged: bool = False, dies: int | None = None
    ) -> None:
        self.dataset, self.add, self.ragged, self.dies = dataset, add, ragged, dies
        self.calls: list[int] = []

    def __call__(self, shard: int) -> Mapping[str, Tensor]:
        if shard == self.dies:
            raise KeyboardInterrupt
        self.calls.append(shard)
        rows = torch.arange(int(self.dataset.bounds[shard]), int(self.dataset.bounds[shard + 1]))
        if self.ragged:
            lengths = rows % 4
            values = torch.repeat_interleave(rows, lengths)
            return {"values": values[:, None] + torch.tensor([self.add, 0.5]), "lengths": lengths}
        return {"values": rows[:, None, None].float() + self.add + torch.zeros(2, 3)}


def test_values_that_are_known_are_cut_into_shards(glyphs: DataSet) -> None:
    values = np.arange(2 * len(glyphs), dtype=np.int16).reshape(-1, 2)
    values.flags.writeable = False  # as what is read from a file may be
    column = glyphs.write_values("known", PRODUCER, values)
    assert column.read(np.arange(len(glyphs))).tolist() == values.tolist()
    assert (column.meta.dtype, column.meta.shape, len(column.meta.shards)) == ("int16", [2], 3)
    with pytest.raises(DataError, match="entries"):
        glyphs.write_values("short", PRODUCER, values[:-1])


def test_fixed_round_trip(glyphs: DataSet, store: Store) -> None:
    column = glyphs.write_column("x", PRODUCER, Counting(glyphs))
    rows = np.array([39, 0, 17, 17, 15, 16, 31, 32, 3])
    values = column.read(rows)
    assert values.shape == (9, 2, 3) and values[:, 1, 2].tolist() == rows.tolist()
    assert (column.meta.shape, column.meta.dtype, column.meta.kind) == ([2, 3], "float32", "fixed")
    assert column.meta.producer == PRODUCER
    assert (column.read([]).shape, column.read(torch.tensor([5])).shape) == ((0, 2, 3), (1, 2, 3))
    assert not [key for key in store.list("glyphs/columns/x") if key.endswith("0.json")]
    stored = safetensors.torch.load_file(store.path("glyphs/columns/x/00000.safetensors"))
    assert stored["values"].shape == (16, 2, 3)


@pytest.mark.parametrize("rows", [[-1], [40], [[1]], [1.5], [True]])
def test_wrong_rows(glyphs: DataSet, rows: list[object]) -> None:
    with pytest.raises(IndexError):
        glyphs.column("split").read(rows)


def test_ragged_round_trip(glyphs: DataSet) -> None:
    null = {"null": {"values": torch.ones(2, 2)}}
    column = glyphs.write_column("text", PRODUCER, Counting(glyphs, ragged=True), null, "ragged")
    rows = np.array([39, 4, 17, 33, 2, 2])
    values, mask = column.read_ragged(rows)
    assert (values.shape, mask.shape, mask.dtype) == ((6, 3, 2), (6, 3), torch.bool)
    assert mask.sum(1).tolist() == (rows % 4).tolist()
    for row, value, real in zip(rows, values, mask, strict=True):
        assert value[real].tolist() == [[row, row + 0.5]] * int(row % 4)
        assert value[~real].abs().sum() == 0
    assert column.meta.max_length == 3
    longer, wide = column.read_ragged(rows, 5)
    assert torch.equal(longer[:, :3], values)
    assert not wide[:, 3:].any()
    short, narrow = column.read_ragged(rows, 2)
    assert torch.equal(short, values[:, :2]) and torch.equal(narrow, mask[:, :2])
    assert column.read_ragged([4, 8])[0].shape == (2, 0, 2)
    assert column.read_ragged([])[0].shape == (0, 0, 2)
    assert torch.equal(column.extra("null")["values"], torch.ones(2, 2))
    with pytest.raises(DataError, match="no 'nil'"):
        column.extra("nil")
    lengths = safetensors.torch.load_file(glyphs.store.path(f"{column.folder}/00000.safetensors"))["lengths"]
    assert lengths.dtype == torch.int32


CAPTIONS = [["a", "b"], ["a"], [""], ["c", "a", "b"], ["d"]]
"""Of rows in turn; the states of a caption are its letter's number, as often as that."""


def _texts(dataset: DataSet) -> Column:
    def compute(shard: int) -> Mapping[str, Tensor]:
        rows = range(int(dataset.bounds[shard]), int(dataset.bounds[shard + 1]))
        return ragged([CAPTIONS[row % 5] for row in rows], _states)

    return dataset.write_column("text", PRODUCER, compute, kind="ragged")


def _states(caption: str) -> Tensor:
    number = " abcd".index(caption) if caption else 0
    return torch.full((number, 2), float(number))


def test_rows_share_sequences_and_choose_among_several(glyphs: DataSet, store: Store) -> None:
    column = _texts(glyphs)
    with safetensors.safe_open(store.path(f"{column.folder}/00000.safetensors"), "pt") as file:
        shapes = {name: tuple(file.get_tensor(name).shape) for name in file.keys()}  # noqa: SIM118
    assert shapes == {"values": (10, 2), "lengths": (5,), "index": (26,), "choices": (16,)}
    rows = np.array([39, 5, 18, 2, 3, 3, 0])
    assert column.read_ragged(rows)[1].sum(1).tolist() == [4, 1, 3, 0, 3, 3, 1]  # the first counts
    chosen = torch.tensor([0.99, 0.5, 0.34, 0.5, 0.0, 0.67, 0.999999])
    values, mask = column.read_ragged(rows, draw=lambda: chosen)
    assert mask.sum(1).tolist() == [4, 2, 1, 0, 3, 2, 2]
    assert values[0].tolist() == [[4.0, 4.0]] * 4 and values[1].tolist()[:2] == [[2.0, 2.0]] * 2
    assert column.meta.max_length == 4 and audit(glyphs) == []


def test_without_repeats_nothing_is_added_and_nothing_is_drawn(glyphs: DataSet) -> None:
    assert set(ragged([["a"], ["b"], [""]], _states)) == {"values", "lengths"}
    column = glyphs.write_column("text", PRODUCER, Counting(glyphs, ragged=True), kind="ragged")
    column.read_ragged([1, 39], draw=lambda: pytest.fail("drawn"))


def test_parts_and_unions_keep_all_choices(glyphs: DataSet, store: Store) -> None:
    whole, rows = _texts(glyphs), np.array([33, 0, 38, 7, 20, 3])
    parts = [write_subset(glyphs, rows[a : a + 3], store, f"p{a}", ["text"], 2) for a in (0, 3)]
    joined = union(store, "joined", parts, ["text"]).column("text")
    for chance in (0.0, 0.4, 0.9):
        wanted, real = whole.read_ragged(rows, 4, lambda chance=chance: torch.full((6,), chance))
        values, mask = joined.read_ragged(range(6), 4, lambda chance=chance: torch.full((6,), chance))
        assert torch.equal(values, wanted) and torch.equal(mask, real)
    plain = glyphs.write_column("plain", PRODUCER, Counting(glyphs, ragged=True), kind="ragged")
    assert set(plain.take_ragged(rows)) == {"values", "lengths"}


def test_all_captions_of_a_row_count_and_the_main_one_comes_first(glyphs: DataSet, store: Store) -> None:
    table, sink = glyphs.shard_table(0), io.BytesIO()
    first = table.column("caption").to_pylist()
    more = [[f"{one}, again", one, one] for one in first[:14]] + [None, []]
    pq.write_table(table.append_column("captions", pa.array(more, pa.list_(pa.string()))), sink)
    entry = write_file(store, "glyphs", "rows/00000.parquet", sink.getvalue())
    shards = [Shard(rows=16, files={**glyphs.shards[0].files, "rows": entry}), *glyphs.shards[1:]]
    dataset = DataSet(store, "glyphs", glyphs.manifest.model_copy(update={"shards": shards}))
    assert captions_of(dataset, 0) == [[c, f"{c}, again"] for c in first[:14]] + [[c] for c in first[14:]]
    assert captions_of(dataset, 1) == [[one] for one in dataset.shard_table(1).column("caption").to_pylist()]


@pytest.mark.parametrize(
    ("index", "choices"),
    [
        ([0] * 15, [1] * 16),
        ([0] * 15 + [2], [1] * 16),
        ([0] * 15 + [-1], [1] * 16),
        ([0] * 16, [1] * 15 + [0]),
        ([0] * 16, [1] * 15),
        ([0.0] * 16, [1] * 16),
    ],
)
def test_an_index_that_does_not_fit_is_refused(index: list[float], choices: list[int]) -> None:
    tensors = {"values": torch.zeros(3, 2), "lengths": torch.tensor([1, 2])}
    tensors |= {"index": torch.tensor(index), "choices": torch.tensor(choices)}
    with pytest.raises(DataError, match="index and choices do not fit"):
        describe(tensors, "ragged", 16, "here")


def test_complete_means_nothing_is_computed(glyphs: DataSet) -> None:
    glyphs.write_column("x", PRODUCER, Counting(glyphs))
    again = Counting(glyphs)
    glyphs.write_column("x", dict(reversed(PRODUCER.items())), again)
    glyphs.write_column("x", PRODUCER, again, {"null": {"a": torch.ones(1)}})
    assert again.calls == []
    assert glyphs.column("x").extra("null")["a"].tolist() == [1]


def test_killed_and_called_again_keeps_what_is_valid(glyphs: DataSet, store: Store) -> None:
    with pytest.raises(KeyboardInterrupt):
        glyphs.write_column("x", PRODUCER, Counting(glyphs, dies=2))
    assert not glyphs.has_column("x")
    store.put("glyphs/columns/x/00000.safetensors", store.get("glyphs/columns/x/00000.safetensors")[:-1])
    second = Counting(glyphs)
    glyphs.write_column("x", PRODUCER, second)
    assert sorted(second.calls) == [0, 2]
    assert glyphs.column("x").read(np.arange(40))[:, 0, 0].tolist() == list(range(40))


def test_parts_of_a_column(glyphs: DataSet) -> None:
    compute = Counting(glyphs)
    ColumnJob(glyphs, "x", PRODUCER, compute).write_part(Part(1, 2))
    assert compute.calls == [1] and not glyphs.has_column("x")
    ColumnJob(glyphs, "x", PRODUCER, compute).run()
    ColumnJob(glyphs, "x", PRODUCER, compute).write_part(Part(0, 1))
    assert compute.calls == [1, 0, 2]
    assert glyphs.column("x").read([0, 20, 39])[:, 0, 0].tolist() == [0, 20, 39]


def test_another_producer_trusts_nothing(glyphs: DataSet, store: Store) -> None:
    old, other = glyphs.write_column("x", PRODUCER, Counting(glyphs)), {**PRODUCER, "hash": "2"}
    with pytest.raises(KeyboardInterrupt):
        glyphs.write_column("x", other, Counting(glyphs, add=100, dies=1))
    with pytest.raises(DataError, match="no column 'x'"):
        DataSet.open(store, "glyphs").column("x")
    fresh = Counting(glyphs, add=100)
    column = glyphs.write_column("x", other, fresh)
    assert fresh.calls == [1, 2]
    assert column.read([0, 39])[:, 0, 0].tolist() == [100, 139]
    assert column.meta.producer["hash"] == "2"
    back = Counting(glyphs)
    glyphs.write_column("x", PRODUCER, back)
    assert back.calls == [0, 1, 2]
    assert old.read([39])[0, 0, 0] == 39


def test_a_failing_producer_leaves_the_old_column(glyphs: DataSet) -> None:
    glyphs.write_column("x", PRODUCER, Counting(glyphs))
    with pytest.raises(KeyboardInterrupt):
        glyphs.write_column("x", {"name": "other"}, Counting(glyphs, dies=0))
    assert glyphs.column("x").read([7])[0, 0, 0] == 7


def test_rows_that_changed_make_a_column_stale(glyphs: DataSet, store: Store) -> None:
    glyphs.write_column("x", PRODUCER, Counting(glyphs))
    first, shard, *rest = glyphs.shards
    changed = shard.files["images"].model_copy(update={"sha256": "0" * 64})
    shards = [first, shard.model_copy(update={"files": {**shard.files, "images": changed}}), *rest]
    other = DataSet(store, "glyphs", glyphs.manifest.model_copy(update={"shards": shards}))
    assert not other.has_column("x")
    with pytest.raises(DataError, match="other rows"):
        other.column("x")
    compute = Counting(glyphs)
    other.write_column("x", PRODUCER, compute)
    assert compute.calls == [1]


@pytest.mark.parametrize("damage", [flip, lambda path: os.truncate(path, 100), Path.unlink])
def test_damage_is_found_and_mended(glyphs: DataSet, store: Store, damage: Callable[[Path], None]) -> None:
    glyphs.write_column("x", PRODUCER, Counting(glyphs))
    damage(store.path("glyphs/columns/x/00001.safetensors"))
    column = DataSet.open(store, "glyphs").column("x")
    assert column.read([0, 39]).shape == (2, 2, 3)
    with pytest.raises(StoreError, match="00001"):
        column.read([20])
    mended = Counting(glyphs)
    glyphs.write_column("x", PRODUCER, mended)
    assert mended.calls == [1]
    assert glyphs.column("x").read([20])[0, 0, 0] == 20


@pytest.mark.parametrize(
    "tensors",
    [
        {"values": torch.zeros(3, 2)},
        {"values": torch.tensor(1.0)},
        {"value": torch.zeros(16, 2)},
        {"values": torch.zeros(16, 2), "lengths": torch.ones(16)},
    ],
)
def test_wrong_tensors_are_refused(glyphs: DataSet, tensors: dict[str, Tensor]) -> None:
    with pytest.raises(DataError, match="column 'x', shard 0"):
        glyphs.write_column("x", PRODUCER, lambda shard: tensors)
    assert not glyphs.has_column("x")


def test_shards_of_different_form_and_bad_names(glyphs: DataSet) -> None:
    with pytest.raises(DataError, match="different form"):
        glyphs.write_column("x", PRODUCER, lambda i: {"values": torch.zeros(glyphs.shards[i].rows, i + 1)})
    for name in ["../x", "", "a/b", ".x"]:
        with pytest.raises(DataError, match="cannot name"):
            glyphs.write_column(name, PRODUCER, Counting(glyphs))


def _read_in_child(dataset: DataSet, queue: "multiprocessing.Queue[object]") -> None:
    try:
        column = dataset.column("x")
        assert dataset.store.local is None or dataset.image(3).size == (8, 8)
        queue.put([*column.read([39, 20])[:, 0, 0].tolist(), column.extra("null")["a"].item()])
    except StoreError as error:
        queue.put(str(error))


def in_child(dataset: DataSet) -> object:
    """What a forked worker reads."""
    context = multiprocessing.get_context("fork")
    queue: multiprocessing.Queue[object] = context.Queue()
    process = context.Process(target=_read_in_child, args=(dataset, queue))
    process.start()
    answer = queue.get(timeout=60)
    process.join()
    return answer


def test_shards_read_by_two_threads_do_not_pile_up(glyphs: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a validation reads beside the thread that makes batches."""
    monkeypatch.setattr("atoll.data.columns.MAPPED_SHARDS", 1)
    column, both = glyphs.write_column("x", PRODUCER, Counting(glyphs)), Barrier(2, timeout=60)
    tensors, _ = column.tensors, column.read([0])
    monkeypatch.setattr(column, "tensors", lambda shard: both.wait() >= 0 and tensors(shard))
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda row: float(column.read([row])[0, 0, 0]), [20, 39])] == [20, 39]
    assert len(column._mapped) == 1


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_workers_can_read_and_so_can_a_copy(glyphs: DataSet) -> None:
    glyphs.write_column("x", PRODUCER, Counting(glyphs), {"null": {"a": torch.ones(1)}}).read([39])
    assert in_child(glyphs) == [39, 20, 1] == in_child(DataSet.open(glyphs.store, "glyphs"))
    copy = pickle.loads(pickle.dumps(glyphs))  # noqa: S301, our own: how a spawned worker gets it
    assert copy.column("x").read([39])[0, 0, 0] == 39


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_workers_of_an_object_store_read_local_copies(
    glyphs: DataSet, store: Store, bucket_url: str
) -> None:
    """They never wait for the network; an audit names what is damaged there."""
    bucket = Store.open(bucket_url, create=True)
    for key in store.list("glyphs"):
        bucket.put(key, store.get(key))
    made = DataSet.open(bucket, "glyphs")
    made.write_column("x", PRODUCER, Counting(made), {"null": {"a": torch.ones(1)}})
    dataset = DataSet.open(bucket, "glyphs")
    dataset.column("x")
    assert "a forked process cannot reach s3://" in str(in_child(dataset))
    dataset.localise(["x"])
    assert in_child(dataset) == [39, 20, 1]
    assert audit(dataset) == []
    key = "glyphs/columns/x/00000.safetensors"
    bucket.put(key, bucket.get(key)[:-1] + b"!")
    problems = audit(DataSet.open(bucket, "glyphs"))
    assert len(problems) == 1 and bucket.name(key) in problems[0] and "SHA-256" in problems[0]
