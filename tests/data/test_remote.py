"""Data sets on an object store: forked workers read local copies, and never wait for the network."""

import multiprocessing
import uuid
from pathlib import Path

import pytest
import torch

from atoll.base.errors import StoreError
from atoll.data.audit import audit
from atoll.data.dataset import DataSet
from atoll.store.store import Store
from s3 import BUCKET, S3


@pytest.fixture
def there(glyphs: DataSet, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """A data set on S3 with a column of row numbers."""
    for name, value in {**s3.environment(), "ATOLL_CACHE": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    store = Store.open(f"s3://{BUCKET}/{uuid.uuid4().hex}", create=True)
    here = glyphs.store.sub(glyphs.prefix or ".")
    for key in here.list():
        store.put(f"d/{key}", here.get(key))
    dataset = DataSet.open(store, "d")

    def compute(shard: int) -> dict[str, torch.Tensor]:
        return {"values": torch.arange(*dataset.bounds[shard : shard + 2].tolist()).float()}

    dataset.write_column("x", {"name": "rows"}, compute, {"null": {"a": torch.ones(1)}})
    return DataSet.open(store, "d")


def _read(dataset: DataSet, queue: "multiprocessing.Queue[object]") -> None:
    try:
        column = dataset.column("x")
        queue.put([*column.read([39, 20]).tolist(), column.extra("null")["a"].item()])
    except StoreError as error:
        queue.put(str(error))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_workers_read_what_was_fetched(there: DataSet) -> None:
    context = multiprocessing.get_context("fork")
    there.column("x")
    found = []
    for fetched in (False, True):
        if fetched:
            there.localise(["x"])
        queue: multiprocessing.Queue[object] = context.Queue()
        process = context.Process(target=_read, args=(there, queue))
        process.start()
        found.append(queue.get(timeout=60))
        process.join()
    assert "a forked process cannot reach s3://" in str(found[0])
    assert found[1] == [39.0, 20.0, 1.0]


def test_an_audit_names_what_is_damaged(there: DataSet) -> None:
    assert audit(there) == []
    key = "d/columns/x/00000.safetensors"
    there.store.put(key, there.store.get(key)[:-1] + b"!")
    problems = audit(DataSet.open(there.store, "d"))
    assert problems and all(there.store.name(key) in p and "SHA-256" in p for p in problems[:1])
