"""The interface of the store, the same on local disk, in memory and on S3."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import obstore
import pytest

from atoll.base.errors import StoreError
from atoll.base.hashing import sha256
from atoll.store import cache, ranges
from atoll.store.manifest import write_blocks
from atoll.store.store import Absent, Conflict, Damaged, Store, check_conditional_create


@pytest.fixture
def store(location: str) -> Store:
    return Store.open(location, create=True)


def test_what_is_written_is_read(store: Store) -> None:
    for data in (b"", b"x", bytes(range(256)) * 30_000):  # the last one in several parts
        store.put("a/b", data)
        assert store.get("a/b") == data
        assert store.size("a/b") == len(data)
        assert store.path("a/b").read_bytes() == data
    assert store.exists("a/b") and not store.exists("a") and not store.exists("a/c")


def test_create_writes_once(store: Store) -> None:
    store.create("a", b"first")
    with pytest.raises(Conflict, match="a exists already"):
        store.create("a", b"second")
    assert store.get("a") == b"first"
    store.put("a", b"third")
    assert store.get("a") == b"third"


def test_of_many_that_create_at_once_one_wins(store: Store) -> None:
    won, gate = list[int](), threading.Barrier(6)

    def create(number: int) -> None:
        gate.wait()
        with suppress(Conflict):
            store.create("a", str(number).encode())
            won.append(number)

    with ThreadPoolExecutor(6) as pool:
        [*pool.map(create, range(6))]
    assert len(won) == 1 and store.get("a") == str(won[0]).encode()


def test_lists_names_and_narrowing(store: Store) -> None:
    for key in ("islands/0/a", "islands/0/b/c", "islands/1/a", "islandsx"):
        store.put(key, b"1")
    assert store.list("islands/0") == ["islands/0/a", "islands/0/b/c"]
    assert store.list() == ["islands/0/a", "islands/0/b/c", "islands/1/a", "islandsx"]
    assert store.list("nothing") == []
    island = store.sub("islands/0")
    assert island.list() == ["a", "b/c"] and island.list("b") == ["b/c"]
    assert island.location == store.name("islands/0") == f"{store.location}/islands/0"
    assert island.sub("b").get("c") == b"1"
    for act in (island.get, island.exists, island.path, island.list, island.sub, island.size):
        with pytest.raises(StoreError, match="leads out of"):
            act("../1/a")
    assert Store.open(island.location).list() == ["a", "b/c"]


def test_missing_objects(store: Store) -> None:
    for act in (store.get, store.size, store.modified):
        with pytest.raises(Absent, match="nothing is missing"):
            act("nothing")
    with pytest.raises(Absent, match="nothing is missing"):
        store.copy("nothing", "b")
    store.put("a", b"")
    store.delete("nothing", "a", "a")
    assert store.list() == []


def test_opening_what_is_not_there(location: str) -> None:
    with pytest.raises(Absent):
        Store.open(location)
    Store.open(location, create=True).put("a", b"")
    assert Store.open(location).list() == Store.open(location + "/").list() == ["a"]


def test_the_time_of_change_is_the_stores(store: Store) -> None:
    before = time.time()
    store.put("a", b"1")
    first = store.modified("a")
    assert before - 2 < first < time.time() + 2
    time.sleep(1.1)  # S3 keeps whole seconds
    store.put("a", b"1")
    assert store.modified("a") > first


def test_a_copy_is_another_object(store: Store) -> None:
    store.put("a", b"1")
    store.put("b", b"old")
    store.copy("a", "b")
    store.copy("a", "c/d")
    if store.local is not None:
        store.path("a").write_bytes(b"damaged")  # in place, as no store does it
    store.put("a", b"2")
    assert store.get("b") == store.get("c/d") == b"1"


def test_a_local_copy_is_never_stale(store: Store, tmp_path: Path) -> None:
    store.put("w.bin", b"one")
    first = store.path("w.bin")
    assert first.read_bytes() == b"one" and store.path("w.bin") == first
    store.put("w.bin", b"two")
    assert store.path("w.bin").read_bytes() == b"two"
    if store.local is None:
        assert first.is_relative_to(tmp_path / "cache") and first != store.path("w.bin")
        assert first.stat().st_mode == first.with_name(".lock").stat().st_mode  # for all who share the cache
        store.path("w.bin").write_bytes(b"tw")  # torn
        assert store.path("w.bin").read_bytes() == b"two"
        assert not [p for p in cache.folder().rglob("*") if p.name.startswith(".part-")]


def test_conditional_writes_are_found_and_leave_nothing(store: Store) -> None:
    check_conditional_create(store, "run")
    assert store.list() == []


LARGE, PART = bytes(range(256)) * 4096 * 11, 5 * 2**20


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys that are fetched, a request each, where a part has 5 MiB: S3 takes no smaller ones."""
    monkeypatch.setattr(ranges, "PART", PART)
    keys, get = list[str](), obstore.get

    def counted(objects: Any, key: str, **options: Any) -> Any:
        keys.append(key.rpartition("/")[2])
        return get(objects, key, **options)

    monkeypatch.setattr(obstore, "get", counted)
    return keys


def blocks() -> Iterator[bytes]:
    yield from (LARGE[start : start + PART] for start in range(0, len(LARGE), PART))


def test_an_object_of_many_blocks_is_written_and_held_against_the_store(
    store: Store, location: str, asked: list[str]
) -> None:
    assert store.write("large", blocks()) == (len(LARGE), sha256(LARGE))
    assert store.write("small", iter([b"abc"])) == (3, sha256(b"abc"))
    assert store.write("none", iter([])) == (0, sha256(b""))
    # What S3 says of the parts is enough; an object in memory has no such digest.
    assert asked == (["large"] * 3 + ["small"] if location.startswith("memory") else [])
    assert store.get("large") == LARGE and store.get("small") == b"abc" and store.get("none") == b""


def test_bytes_that_change_on_the_way_are_found_out(
    store: Store, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put = Store._put

    def harmed(self: Store, key: str, data: Iterator[bytes], mode: Any) -> None:
        put(self, key, (block.replace(b"\x07\x08", b"\x07\x07") for block in data), mode)

    monkeypatch.setattr(Store, "_put", harmed)
    with pytest.raises(Damaged, match="large reads back differently"):
        write_blocks(store, "", "large", blocks())


def test_a_large_object_comes_in_parts_and_to_a_machine_once(
    store: Store, location: str, asked: list[str]
) -> None:
    """Eight readers that want it at once wait for the first of them."""
    store.put("large", LARGE)
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: Store.open(location).path("large"), range(8)))
    assert len({*paths}) == 1 and paths[0].read_bytes() == LARGE
    assert asked == ([] if store.local else ["large"] * 3)
