"""Publishing: what has no manifest does not exist, and what is damaged is not read."""

import pytest

from atoll.base.errors import StoreError
from atoll.store.manifest import FileEntry, read_file, write_file
from atoll.store.store import Store

DATA = bytes(range(256))


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
    entry = write_file(store, "p", "d.bin", DATA)
    path = store.path("p/d.bin")
    if harm:
        path.write_bytes(harm(path.read_bytes()))
    else:
        path.unlink()
    with pytest.raises(StoreError, match=message) as caught:
        read_file(store, "p", entry)
    assert str(path) in str(caught.value)


def test_a_manifest_cannot_name_files_outside(store: Store) -> None:
    entry = FileEntry(path="../../outside", bytes=1, sha256="0" * 64)
    with pytest.raises(StoreError, match="leads out of"):
        read_file(store, "p", entry)
