"""Publishing: what has no manifest does not exist, and what is damaged is not read."""

from pathlib import Path
from typing import Any

import pytest

from atoll.base.errors import StoreError
from atoll.store.manifest import FileEntry, Published, publish, read_file, read_published, write_file
from atoll.store.store import Conflict, Store


class Manifest(Published):
    FORMAT = "test/manifest"

    step: int = 0


BLOBS = {"a.bin": b"abc" * 100, "b/c.bin": b"", "d.bin": bytes(range(256))}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path)


def test_without_a_manifest_there_is_nothing(store: Store) -> None:
    for path, data in BLOBS.items():
        write_file(store, "p", path, data)
    with pytest.raises(StoreError, match=r"M\.json is missing"):
        read_published(store, "p", "M.json", Manifest)


def test_nothing_is_published_twice(store: Store) -> None:
    publish(store, "p", BLOBS, "M.json", Manifest(step=1))
    with pytest.raises(Conflict):
        publish(store, "p", BLOBS, "M.json", Manifest(step=2))
    assert read_published(store, "p", "M.json", Manifest)[0].step == 1


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda data: data[:-1], "is torn"),
        (lambda data: data + b"x", "is torn"),
        (lambda data: b"", "is torn"),
        (lambda data: data[:50] + bytes([data[50] ^ 1]) + data[51:], "does not match its SHA-256"),
        (None, "is missing"),
    ],
    ids=["torn", "longer", "empty", "flipped", "missing"],
)
def test_damage_is_told_with_the_name_of_the_file(store: Store, harm, message: str) -> None:
    publish(store, "p", BLOBS, "M.json", Manifest())
    path = store.path("p/d.bin")
    if harm:
        path.write_bytes(harm(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(StoreError, match=message) as caught:
        read_published(store, "p", "M.json", Manifest)
    assert str(path) in str(caught.value)


def test_a_manifest_cannot_name_files_outside(store: Store) -> None:
    entry = FileEntry(path="../../outside", bytes=1, sha256="0" * 64)
    with pytest.raises(StoreError, match="leads out of"):
        read_file(store, "p", entry)


def test_a_disk_that_lies_is_found_out_before_the_manifest(tmp_path: Path) -> None:
    class Lying(Store):
        def _put(self, key: str, data: Any, mode: str) -> None:
            super()._put(key, b"".join(data)[:-1] if key.endswith("d.bin") else data, mode)

    with pytest.raises(StoreError, match="reads back differently"):
        publish(Lying.open(tmp_path), "p", BLOBS, "M.json", Manifest())
    assert not Store.open(tmp_path).exists("p/M.json")
