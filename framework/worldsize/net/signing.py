"""Creates keys and signs certificates (ECDSA P-256) for :mod:`worldsize.net.credentials`."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from worldsize.errors import ConfigError

LIFETIME = timedelta(days=365)
EARLIER = timedelta(minutes=5)  # how far validity is backdated, since the hosts' clocks differ


def sign_authority(folder: Path, name: str) -> None:
    """Create a certificate authority: write its key and its self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    draft = _build_certificate(name, name, key.public_key(), is_authority=True)
    _write_credentials(folder, name, key, draft.sign(key, hashes.SHA256()))


def sign_process(folder: Path, name: str, *, authority: str) -> None:
    """Write a process's key and signed certificate.

    Raises:
        ConfigError: the key of ``authority`` is unreadable.
    """
    authority_key = _read_key(folder / f"{authority}.key")
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    draft = _build_certificate(name, authority, key.public_key(), is_authority=False).add_extension(
        issuer, critical=False
    )
    _write_credentials(folder, name, key, draft.sign(authority_key, hashes.SHA256()))


def get_signing_time() -> datetime:
    """Return the current time; a function, so that tests can shift the validity of certificates."""
    return datetime.now(UTC)


def _build_certificate(
    name: str, issuer: str, key: ec.EllipticCurvePublicKey, *, is_authority: bool
) -> x509.CertificateBuilder:
    begins = get_signing_time() - EARLIER
    return (
        x509.CertificateBuilder()
        .subject_name(_common_name(name))
        .issuer_name(_common_name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(begins + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(_build_key_usage(is_authority=is_authority), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _build_key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"failed to read the key {path} of the certificate authority: {error}. Delete the folder {path.parent}, "
            "and launch the run again."
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(
            f"{path} is not an elliptic-curve key. Delete the folder {path.parent}, and launch the run again."
        )
    return key


def _write_credentials(folder: Path, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    """Write the key before the certificate, so that a certificate's key always exists."""
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write_private(folder / f"{name}.key", private)
    _write_private(folder / f"{name}.pem", certificate.public_bytes(encoding))


def _write_private(path: Path, text: bytes) -> None:
    """Write a file atomically, readable only by its owner."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as draft:  # mode 0600
        draft.write(text)
    Path(draft.name).replace(path)
