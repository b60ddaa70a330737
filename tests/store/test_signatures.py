"""Signatures of OpenSSF Model Signing: made in any store, verified by its own command, forged."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.base.errors import AtollError, ConfigError, DataError, StoreError
from atoll.base.hashing import sha256
from atoll.store.signatures import SIGNATURE, check_key, check_trusted, sign, signer
from atoll.store.store import Store
from keys import certified, key_pair

FILES = {"card.json": b'{"k": 2}', "weights": b"1234", "deep/er": b"x"}


@pytest.fixture
def store(location: str) -> Store:
    store = Store.open(location, create=True)
    for path, data in FILES.items():
        store.put(f"expert/{path}", data)
    return store


def signed(store: Store, key: Path) -> None:
    sign(store, "expert", {path: sha256(data) for path, data in FILES.items()}, key)


def trust(store: Store, *keys: object, known: tuple[str, ...] = ()) -> str:
    named = {path: sha256(FILES[path]) for path in known}
    return check_trusted(store, "expert", [str(key) for key in keys], named)


def verified(folder: Path, *how: object) -> bool:
    argv = "verify", how[0], folder, "--signature", folder / SIGNATURE, *how[1:]
    command = [sys.executable, "-m", "model_signing", *map(str, argv)]
    return subprocess.run(command, capture_output=True).returncode == 0


def test_a_folder_of_any_store_is_signed_as_the_standard_says(store: Store, tmp_path: Path):
    private, public = key_pair(tmp_path / "mine")
    _, other = key_pair(tmp_path / "other")
    with pytest.raises(StoreError, match=r"is unsigned \(no model\.sig\)"):
        trust(store, public)
    signed(store, private)
    assert trust(store, other, public) == trust(store, public.read_text()) == signer(store, "expert")
    with pytest.raises(StoreError, match=r"signed by key .* which is not trusted"):
        trust(store, other)
    copy = tmp_path / "copy"
    for key in store.list("expert"):
        (copy / key).parent.mkdir(parents=True, exist_ok=True)
        (copy / key).write_bytes(store.get(key))
    assert verified(copy / "expert", "key", "--public_key", public)
    assert not verified(copy / "expert", "key", "--public_key", other)
    (copy / "expert/weights").write_bytes(b"1235")
    assert not verified(copy / "expert", "key", "--public_key", public)


@pytest.mark.parametrize("location", ["local"], indirect=True)
def test_what_the_command_of_the_standard_signs_is_taken(store: Store, tmp_path: Path):
    assert store.local is not None
    (private, public), folder = key_pair(tmp_path / "mine"), store.local / "expert"
    argv = ["sign", "key", folder, "--signature", folder / SIGNATURE, "--private_key", private]
    subprocess.run([sys.executable, "-m", "model_signing", *argv], check=True, capture_output=True)
    assert trust(store, public) == signer(store, "expert")
    argv += ["--ignore-paths", folder / "weights"]
    subprocess.run([sys.executable, "-m", "model_signing", *argv], check=True, capture_output=True)
    assert verified(folder, "key", "--public_key", public)
    with pytest.raises(StoreError, match=r"Extra files found in model 'expert': weights"):
        trust(store, public)  # a signature that leaves a file out says nothing of it


def test_a_file_changed_missing_or_too_many_is_refused(store: Store, tmp_path: Path):
    private, public = key_pair(tmp_path / "mine")
    signed(store, private)
    store.put("expert/card.json", b'{"k": 3}')
    with pytest.raises(StoreError, match=r"not what its signature says .*mismatch for 'card\.json'"):
        trust(store, public)
    store.delete("expert/card.json")
    with pytest.raises(StoreError, match=r"Missing files in model 'expert': card\.json"):
        trust(store, public)
    store.put("expert/card.json", FILES["card.json"])
    store.put("expert/more", b"")
    with pytest.raises(StoreError, match="Extra files found in model 'expert': more"):
        trust(store, public)
    store.delete("expert/more")
    store.put("expert/.gitattributes", b"")
    trust(store, public)


@pytest.mark.parametrize("location", ["local"], indirect=True)
def test_files_that_are_held_against_a_digest_are_not_read_twice(store: Store, tmp_path: Path):
    private, public = key_pair(tmp_path / "mine")
    signed(store, private)
    store.delete("expert/weights")
    trust(store, public, known=("weights",))
    with pytest.raises(StoreError, match="Hash mismatch for 'weights'"):
        check_trusted(store, "expert", [str(public)], {"weights": "0" * 64})


@pytest.mark.parametrize("location", ["local"], indirect=True)
def test_forged_and_damaged_signatures_are_refused(store: Store, tmp_path: Path):
    private, public = key_pair(tmp_path / "mine")
    other, _ = key_pair(tmp_path / "other")
    signed(store, private)
    mine = json.loads(store.get(f"expert/{SIGNATURE}"))
    signed(store, other)
    theirs = json.loads(store.get(f"expert/{SIGNATURE}"))
    changed = json.loads(base64.b64decode(mine["dsseEnvelope"]["payload"]))
    changed["predicate"]["resources"].pop()
    payload = base64.b64encode(json.dumps(changed).encode()).decode()
    envelope, hint = mine["dsseEnvelope"], mine["verificationMaterial"]
    for bundle in (
        {**theirs, "verificationMaterial": hint},  # signed by another, in my name
        {**mine, "dsseEnvelope": {**envelope, "payload": payload}},
        {**mine, "dsseEnvelope": {**envelope, "signatures": []}},
        {**mine, "dsseEnvelope": {**envelope, "payloadType": "text/plain"}},
        {**mine, "mediaType": "text/plain"},
        {"verificationMaterial": hint},
    ):
        store.put_json(f"expert/{SIGNATURE}", bundle)
        with pytest.raises(StoreError, match="not trusted or signed something else"):
            trust(store, public)
    for damaged in (b"", b"[]", b"{}", b'{"verificationMaterial": {"publicKey": {"hint": "\\u001b[2J"}}}'):
        store.put(f"expert/{SIGNATURE}", damaged)
        with pytest.raises(StoreError, match=r"model\.sig is no"):
            trust(store, public)


@pytest.mark.parametrize("location", ["local"], indirect=True)
def test_a_certificate_signs_and_its_authority_is_trusted(store: Store, tmp_path: Path):
    (signs, authority), (_, stranger) = certified(tmp_path / "mine"), certified(tmp_path / "other")
    signed(store, signs)
    assert trust(store, authority) == signer(store, "expert")
    assert str(signer(store, "expert")).startswith("certificate ")
    assert store.local is not None
    assert verified(store.local / "expert", "certificate", "--certificate_chain", authority)
    for other in (stranger, key_pair(tmp_path / "key")[1]):
        with pytest.raises(StoreError, match=r"signed by certificate .* which is not trusted"):
            trust(store, other)


@pytest.mark.parametrize("location", ["local"], indirect=True)
def test_keys_that_are_none(store: Store, tmp_path: Path):
    (private, public), file = key_pair(tmp_path / "mine"), tmp_path / "text"
    curve, old = key_pair(tmp_path / "old", "secp256k1")
    for text in ("x", "-----BEGIN PRIVATE KEY-----\nMC4\n-----END PRIVATE KEY-----\n", public.read_text()):
        file.write_text(text)
        with pytest.raises(ConfigError, match="no private key of an elliptic curve"):
            check_key(file)
    with pytest.raises(ConfigError, match="no private key of an elliptic curve"):
        check_key(curve)
    with pytest.raises(DataError, match="cannot read"):
        check_key(tmp_path / "none")
    signed(store, private)
    for key in (file.write_text("x") and file, private, old, "-----BEGIN CERTIFICATE-----"):
        with pytest.raises(ConfigError, match="in trusted is no public key"):
            trust(store, key)
    for key in ("mine", tmp_path, "/dev/zero"):
        with pytest.raises(DataError, match=r"cannot read|is no file"):
            trust(store, key)


@pytest.mark.parametrize("location", ["local"], indirect=True)
def test_without_a_network_sigstore_is_refused_in_one_line(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))  # where its roots of trust would lie
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    for tried in (lambda: check_key(Path("sigstore")), lambda: trust(store, "me https://127.0.0.1:9")):
        with pytest.raises(AtollError, match=r"sigstore does not answer .* or use a key"):
            tried()
