"""The store: objects that are whole or not there, and keys that stay inside."""

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.base.errors import StoreError
from atoll.store.store import Store
from helpers import python


def test_a_reader_never_sees_half_an_object(store: Store) -> None:
    """One thread overwrites, another reads: every answer is one of the two values, whole."""
    values = [b"a" * 3_000_000, b"b" * 2_000_000]
    store.put("x", values[0])
    stop = threading.Event()

    def write() -> None:
        for turn in range(60):
            store.put("x", values[turn % 2])
        stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not stop.is_set():
        data = store.get("x")
        assert data in values
        seen.add(data[:1])
    writer.join()
    assert seen == {b"a", b"b"}
    assert store.list() == ["x"]  # nothing temporary is left


@pytest.mark.parametrize("key", ["../x", "a/../../x", "/etc/passwd", "..", "a/../..", "../s2/x"])
def test_keys_that_lead_out_are_refused(store: Store, key: str) -> None:
    (Path(store.location).parent / "x").write_text("secret")
    reads = store.get, store.exists, store.delete, store.list, store.path, store.sub
    for act in (*reads, lambda key: store.put(key, b""), lambda key: store.create(key, b"")):
        with pytest.raises(StoreError, match="leads out of"):
            act(key)
    assert (Path(store.location).parent / "x").read_text() == "secret"


def test_json(store: Store) -> None:
    store.put_json("a.json", {"ä": [1, None, 1.5]})
    assert store.get_json("a.json") == {"ä": [1, None, 1.5]}
    assert store.get("a.json").endswith(b"\n") and "ä".encode() in store.get("a.json")
    with pytest.raises(ValueError, match="JSON"):
        store.put_json("a.json", float("nan"))
    for data in (b"{", b"\xff"):
        store.put("a.json", data)
        with pytest.raises(StoreError, match="is not valid JSON"):
            store.get_json("a.json")


# A folder that only others may write to.


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A folder with one object that `nobody` may read and not change."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    folder = Path(tempfile.mkdtemp())
    Store.open(folder).put("a", b"1")
    folder.chmod(0o755)
    (folder / "a").chmod(0o644)
    yield folder
    shutil.rmtree(folder)


def test_a_folder_that_may_only_be_read(foreign: Path) -> None:
    script = """
import json, os, sys
from atoll.base.errors import StoreError
from atoll.store.store import Store
os.setuid(65534)  # after the imports: nobody may not read the interpreter's files
store, said = Store.open(sys.argv[1]), [Store.open(sys.argv[1]).get("a").decode()]
for act in (lambda: store.put("a", b"2"), lambda: store.create("b", b"2"), lambda: store.sub("c"),
            lambda: store.delete("a"), lambda: Store.open(sys.argv[1] + "/d", create=True)):
    try:
        act()
        said.append("done")
    except StoreError as error:
        said.append(str(error))
print(json.dumps(said))
"""
    out, err = (process := python("-c", script, foreign, cwd=Path("/"))).communicate()
    assert process.returncode == 0, err
    said = json.loads(out)
    assert said[0] == "1"
    assert all(("cannot write" in s or "cannot use" in s or "cannot remove" in s) for s in said[1:]), said
    assert sorted(p.name for p in foreign.iterdir()) == ["a"]
