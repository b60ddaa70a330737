"""Who made a file: an ed25519 signature beside it, `NAME.sig`, and the keys that are trusted.

A manifest or card names every file by its hash, so that signing it signs all of them. What carries no
signature stays usable, and is called unsigned.

What is signed: `ensemble.json` of an exported folder, and `card.json` of a published network, which names its
weights, its settings, its cluster and its partition.
"""

import base64
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from atoll.base.errors import ConfigError, StoreError
from atoll.base.format import File
from atoll.store.store import Store, to_json

PREFIX = "ed25519:"
SUFFIX = ".sig"
UNSIGNED = "unsigned"
_FIX = "fetch the file and its signature again, or remove the signature if you trust the file without it"


class Signature(File):
    """`NAME.sig` beside a signed file."""

    FORMAT, PLACE, REMEDY = "atoll/signature", "NAME.sig", _FIX
    key: str
    """Public key of the signer: `ed25519:` and base64 of its 32 bytes."""
    signature: str
    """Base64 of the 64 bytes of the signature of the file's bytes."""


def new_key(path: Path) -> str:
    """Write a new private key (PEM, PKCS 8, no passphrase), readable by its owner only; the public key."""
    ed25519, serialization = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        # Closed to others from its first byte, and never written through a link that somebody laid there.
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", "name a new file") from None
    with os.fdopen(file, "wb") as opened:
        opened.write(pem)
    return _text(key.public_key())


def public_key(path: Path) -> str:
    """The public key that belongs to a private one."""
    return _text(_private(path).public_key())


def sign(store: Store, name: str, key: Path) -> str:
    """Sign a file of a store with a private key; writes `NAME.sig` and returns the public key."""
    private = _private(key)
    signature = base64.b64encode(private.sign(store.get(name))).decode()
    content = Signature(key=_text(private.public_key()), signature=signature)
    store.put(name + SUFFIX, to_json(content.to_json()))
    return content.key


def sign_folder(location: str | Path, key: Path) -> list[str]:
    """Sign what a folder holds (an export, a campaign, the folder of one run); names of the signed files."""
    store = Store.open(location)
    if store.exists("ensemble.json"):
        names = ["ensemble.json"]
    else:
        places = r"((islands/\d+|[a-z]+)/)?(expert/)?card\.json"
        names = [name for name in store.list() if re.fullmatch(places, name)]
    if not names:
        fix = "give an export, a campaign, or the folder of a run that has published"
        raise ConfigError(f"{store.location} holds nothing to sign", fix)
    for name in names:
        sign(store, name, key)
    return names


def signer(store: Store, name: str) -> str | None:
    """The public key that signed a file; None if unsigned, `StoreError` if the signature is another's."""
    if not store.exists(name + SUFFIX):
        return None
    content = Signature.read(store, name + SUFFIX)
    _cryptography()
    from cryptography.exceptions import InvalidSignature

    try:
        key = _public(content.key)
        # Without `validate`, b64decode would pass over characters that are no base64.
        key.verify(base64.b64decode(content.signature, validate=True), store.get(name))
    except (InvalidSignature, ValueError):
        raise StoreError(f"{store.name(name)} is not what its signature says", _FIX) from None
    return content.key


def check_trusted(store: Store, name: str, trusted: Collection[str]) -> str:
    """Refuse a file that none of these keys signed; the key that did."""
    # Before the file: a mistyped key would look like a file that somebody else signed.
    for key in trusted:
        try:
            _public(key)
        except ValueError:
            fix = f"write it as atoll keys show prints it: {PREFIX}..."
            raise ConfigError(f"{key!r} is no public key", fix) from None
    by = signer(store, name)
    if by is None:
        raise StoreError(f"{store.name(name)} is unsigned", "ask its maker to sign it: atoll keys sign")
    if by not in trusted:
        raise StoreError(f"{store.name(name)} is signed by {by}, which is not trusted", "check the key")
    return by


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ConfigError("signatures need the package cryptography", "pip install -e '.[sign]'") from None
    return ed25519, serialization


def _private(path: Path) -> Any:
    ed25519, serialization = _cryptography()
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}", "check the path") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{path} is no private key", "make one: atoll keys new FILE") from None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise ConfigError(f"{path} is no ed25519 key", "make one: atoll keys new FILE")
    return key


def _public(text: str) -> Any:
    ed25519, _ = _cryptography()
    if not text.startswith(PREFIX):
        raise ValueError(text)
    return ed25519.Ed25519PublicKey.from_public_bytes(
        base64.b64decode(text.removeprefix(PREFIX), validate=True)
    )


def _text(public: Any) -> str:
    return PREFIX + base64.b64encode(public.public_bytes_raw()).decode()
