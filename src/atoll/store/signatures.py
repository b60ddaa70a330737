"""Who made a folder: `model.sig` in it, a signature of OpenSSF Model Signing, and whom one trusts.

The signature names every file of the folder by SHA-256, as the package `model-signing` writes it: its own
command verifies what Atoll signed, and Atoll takes what that command signed. The package hashes local folders
only. Here the digests come from the store and its manifests: so a bucket's folder is signed like a local one,
and weights that are held against their digest when they are read are not read twice.
"""

import re
from base64 import b64decode
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256 as fingerprint
from pathlib import Path, PurePosixPath
from posixpath import join, relpath
from tempfile import TemporaryDirectory
from typing import Any

from atoll.base.errors import AtollError, ConfigError, StoreError, extra, first_line
from atoll.base.hashing import sha256
from atoll.base.safe_parse import expanded, read_bytes
from atoll.store.store import Store, regular

SIGNATURE, UNSIGNED = "model.sig", "unsigned"
SIGSTORE = "sigstore"
"""In place of a key's file: sign as who one is on the network, without a key."""
LARGEST_KEY = 2**20
_IGNORED = (SIGNATURE, ".git", ".gitattributes", ".github", ".gitignore")
"""What the standard's command leaves out of a signature."""
_CACHE = ".cache"
"""Where the hub's own download keeps notes, of which nothing is loaded."""
_FIX = "fetch the folder and its signature again, or ask its maker to sign it again"


def check_key(key: Path) -> None:
    """Refuse a file that signs nothing; see `sign`."""
    with _signer(key):
        pass


def sign(store: Store, folder: str, digests: Mapping[str, str], key: Path) -> None:
    """Sign these files of a folder, by path within it; writes `model.sig`.

    `key` is a private key of an elliptic curve as PEM, with certificates after it or none, or `SIGSTORE`.
    """
    with _signer(key) as config, TemporaryDirectory() as scratch:
        place, manifest = Path(scratch) / SIGNATURE, _Digests(store.name(folder), lambda: digests)
        config.set_hashing_config(manifest).sign(scratch, place)
        store.put(join(folder, SIGNATURE), place.read_bytes())


def signer(store: Store, folder: str) -> str | None:
    """Who signed a folder by the signature's own word, which nobody checked; None if it has no signature."""
    if not store.exists(key := join(folder, SIGNATURE)):
        return None
    try:
        material = store.get_json(key)["verificationMaterial"]
        if "publicKey" in material:
            if not re.fullmatch("[0-9a-f]{64}", hint := material["publicKey"]["hint"]):
                raise ValueError(hint)
            return f"key {hint[:16]}"
        chain = material.get("x509CertificateChain", {"certificates": [material.get("certificate")]})
        raw = b64decode(chain["certificates"][0]["rawBytes"], validate=True)
        return f"certificate {fingerprint(raw).hexdigest()[:16]}"
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise StoreError(f"{store.name(key)} is no signature of OpenSSF Model Signing", _FIX) from None


def check_trusted(store: Store, folder: str, trusted: Collection[str], known: Mapping[str, str]) -> str:
    """Refuse a folder that none of these signed, or that lacks or has a file beside those; who did.

    Args:
        trusted: PEM files of public keys or certificates, or their text, or `IDENTITY ISSUER` of sigstore.
        known: SHA-256 by path of files that are held against it whenever they are read. They are not read
            here, and of an export's experts some may not be there.
    """
    name, asked = store.name(folder), False

    def digests() -> dict[str, str]:
        nonlocal asked
        asked = True  # the signature is right: what fails from here on is what it signs
        paths = [relpath(key, folder or ".") for key in store.list(folder)]
        left_out = {*_IGNORED, _CACHE}
        others = [path for path in paths if path not in known and path.split("/")[0] not in left_out]
        return {**known, **{path: sha256(regular(store.path(join(folder, path)))) for path in others}}

    with TemporaryDirectory() as scratch:
        # Keys first: a mistyped one would look like a folder that somebody else signed.
        verifiers = [_verifier(str(text), Path(scratch) / str(n)) for n, text in enumerate(trusted)]
        if (by := signer(store, folder)) is None:
            raise StoreError(f"{name} is unsigned (no {SIGNATURE})", "ask its maker to sign it")
        (place := Path(scratch) / SIGNATURE).write_bytes(store.get(join(folder, SIGNATURE)))
        for config in verifiers:
            try:
                config.set_hashing_config(_Digests(name, digests)).verify(scratch, place)
                return by
            except AtollError:
                raise
            except Exception as error:  # a stranger's bundle makes the libraries below raise anything
                if asked:
                    # A list of texts, the first of which goes on with both digests.
                    why = str(error).replace("\\", "").partition("mismatch: ")[2][2:].split(": Expected")[0]
                    why = why.removesuffix("']").removesuffix('"]')[:200] or first_line(error)[:200]
                    raise StoreError(f"{name} is not what its signature says ({why})", _FIX) from None
    what = f"{name} is signed by {by}, which is not trusted or signed something else"
    raise StoreError(what, "check the key")


class _Digests:
    # What `model_signing.hashing.Config` is to the two commands: the manifest of a folder.
    def __init__(self, name: str, digests: Any) -> None:
        self.name, self.digests = name, digests

    def hash(self, path: object, *, files_to_hash: object = None) -> Any:
        from model_signing import manifest
        from model_signing._hashing.hashing import Digest

        digests = {path: Digest("sha256", bytes.fromhex(value)) for path, value in self.digests().items()}
        items = [manifest.FileManifestItem(path=PurePosixPath(p), digest=d) for p, d in digests.items()]
        how = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
        kind = manifest.SerializationType.from_args({**how, "ignore_paths": _IGNORED})
        return manifest.Manifest(PurePosixPath(self.name).name, items, kind)

    def add_ignored_paths(self, **ignored: object) -> None:
        pass  # A signature that leaves out files would let anybody change them.


@contextmanager
def _signer(key: Path) -> Iterator[Any]:
    signing, _ = _library()
    config, fix = signing.Config(), "make one: openssl ecparam -name prime256v1 -genkey -noout -out FILE"
    if str(key) == SIGSTORE:
        with _reached():
            yield config.use_sigstore_signer(use_ambient_credentials=True)
        return
    data = read_bytes(key, LARGEST_KEY)
    try:
        if b"BEGIN CERTIFICATE" in data:
            files = {"private_key": key, "signing_certificate": key, "certificate_chain": [key]}
            config.use_certificate_signer(**files)
        else:
            config.use_elliptic_key_signer(private_key=key)
    except Exception:  # of another kind, of another curve, with a password
        raise ConfigError(f"{key} is no private key of an elliptic curve without a password", fix) from None
    yield config


def _verifier(text: str, place: Path) -> Any:
    _, verifying = _library()
    config, (identity, _, issuer) = verifying.Config(), text.partition(" ")
    if issuer.startswith("https://"):
        with _reached():
            return config.use_sigstore_verifier(identity=identity, oidc_issuer=issuer)
    given = text.startswith("-----BEGIN")
    data = text.encode() if given else read_bytes(expanded(text), LARGEST_KEY)
    place.write_bytes(data)
    try:
        if b"BEGIN CERTIFICATE" in data:
            return config.use_certificate_verifier(certificate_chain=[place])
        return config.use_elliptic_key_verifier(public_key=place)
    except Exception:
        what = "a text" if given else text
        fix = "give the file of: openssl pkey -in KEY -pubout"
        raise ConfigError(f"{what} in trusted is no public key of an elliptic curve", fix) from None


@contextmanager
def _reached() -> Iterator[None]:
    try:
        yield
    except AtollError:
        raise
    except Exception as error:
        what = f"sigstore does not answer ({first_line(error)[:200]})"
        raise ConfigError(what, "check the network, or use a key") from None


def _library() -> Any:
    # Here, since it imports all of sigstore: a second.
    with extra("sign", "signatures need the package model-signing"):
        from model_signing import signing, verifying
    return signing, verifying
