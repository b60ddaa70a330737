"""Signatures: made, checked, forged."""

import json
import stat
from pathlib import Path

import pytest

from atoll.base.errors import ConfigError, StoreError
from atoll.store.signatures import check_trusted, new_key, public_key, sign, signer
from atoll.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.open(tmp_path / "store", create=True)
    store.put("card.json", b'{"k": 2}')
    return store


@pytest.fixture
def key(tmp_path: Path) -> Path:
    new_key(tmp_path / "key")
    return tmp_path / "key"


def test_who_signed_is_known(store: Store, key: Path):
    assert signer(store, "card.json") is None
    assert sign(store, "card.json", key) == signer(store, "card.json") == public_key(key)
    trusted = ["ed25519:" + "A" * 43 + "=", public_key(key)]
    assert check_trusted(store, "card.json", trusted) == public_key(key)
    assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_changed_bytes_and_forged_signatures_are_refused(store: Store, key: Path, tmp_path: Path):
    sign(store, "card.json", key)
    signature = store.get("card.json.sig")
    store.put("card.json", b'{"k": 3}')
    with pytest.raises(StoreError, match="is not what its signature says"):
        signer(store, "card.json")
    store.put("card.json", b'{"k": 2}')
    other = {**json.loads(signature), "key": new_key(tmp_path / "other")}
    for content in (other, {**other, "key": "ed25519:x"}, {**other, "signature": "?"}):
        store.put_json("card.json.sig", content)
        with pytest.raises(StoreError, match="is not what its signature says"):
            signer(store, "card.json")
    for damaged in (b"", b"[]", signature[:-20]):
        store.put("card.json.sig", damaged)
        with pytest.raises(StoreError, match=r"card\.json\.sig"):
            signer(store, "card.json")


def test_only_trusted_signers_pass(store: Store, key: Path, tmp_path: Path):
    with pytest.raises(StoreError, match="is unsigned"):
        check_trusted(store, "card.json", [public_key(key)])
    sign(store, "card.json", key)
    with pytest.raises(StoreError, match="is not trusted"):
        check_trusted(store, "card.json", [new_key(tmp_path / "other")])
    with pytest.raises(ConfigError, match="no public key"):
        check_trusted(store, "card.json", ["mine"])


def test_keys_that_are_none(store: Store, key: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (key, tmp_path / "link"):
        with pytest.raises(ConfigError, match="File exists"):
            new_key(path)
    with pytest.raises(ConfigError, match="cannot read the key"):
        sign(store, "card.json", tmp_path / "none")
    for text in ("x", "MC4CAQAwBQYDK2V5BCIEI" + "A" * 43):  # the second is of a curve that nobody knows
        (tmp_path / "text").write_text(f"-----BEGIN PRIVATE KEY-----\n{text}\n-----END PRIVATE KEY-----\n")
        with pytest.raises(ConfigError, match="no private key"):
            sign(store, "card.json", tmp_path / "text")
