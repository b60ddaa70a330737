"""Keys and certificates that tests sign with, as openssl would make them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID


def key_pair(place: Path, curve: str = "secp256r1") -> tuple[Path, Path]:
    """Write a private and a public key as PEM; their files."""
    key = ec.generate_private_key({"secp256r1": ec.SECP256R1(), "secp256k1": ec.SECP256K1()}[curve])
    private, public = place.with_suffix(".pem"), place.with_suffix(".pub")
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


def certified(place: Path) -> tuple[Path, Path]:
    """Write a private key with its certificate in one file, and that of the authority; their files."""
    names = [x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]) for name in (place.name, "maker")]
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in names]
    made = []
    for name, key in zip(names, keys, strict=True):
        builder = x509.CertificateBuilder(names[0], name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(datetime.now(UTC) - timedelta(1))
        builder = builder.not_valid_after(datetime.now(UTC) + timedelta(1))
        builder = builder.add_extension(x509.BasicConstraints(name == names[0], None), critical=True)
        usage = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
        )
        usage |= dict.fromkeys(("crl_sign", "encipher_only", "decipher_only"), False)
        signs = x509.KeyUsage(digital_signature=True, key_cert_sign=name == names[0], **usage)
        made.append(builder.add_extension(signs, critical=True).sign(keys[0], hashes.SHA256()))
    private, authority = place.with_suffix(".pem"), place.with_suffix(".authority")
    pem = keys[1].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    private.write_bytes(pem + made[1].public_bytes(Encoding.PEM))
    authority.write_bytes(made[0].public_bytes(Encoding.PEM))
    return private, authority
