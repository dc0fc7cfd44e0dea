"""``attestation.json``: a signed in-toto statement about a run, which other tools can verify.

It is an in-toto Statement (v1) in a DSSE envelope (v1.0.2), signed with the user's Ed25519 key. Its subjects are the
SHA-256 of the manifest, the chain and the manifests of the kept checkpoints. The manifest's own signature is an HMAC,
which only its author can verify.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from worldsize.checkpoint.format import MANIFEST, complete, hash_file
from worldsize.errors import WorldsizeError
from worldsize.files import read_regular, replace_file
from worldsize.record.manifest import create_key_file, find_key
from worldsize.record.run_directory import RunDirectory
from worldsize.strict_json import LARGEST, parse_strict_json

_logger = logging.getLogger(__name__)

_PAYLOAD = "application/vnd.in-toto+json"
_PREDICATE = "urn:worldsize:run:v1"
_LONGEST_KEY = 1 << 12  # maximum bytes of a key file


def write_attestation(run: RunDirectory, manifest: Mapping[str, Any]) -> None:
    """Write the signed statement about a run that has ended; do nothing if the user has no usable key."""
    key = _read_private_key()
    if key is None:
        return
    try:
        replace_file(run.attestation, f"{json.dumps(_sign_statement(run, manifest, key), indent=2)}\n".encode())
    except OSError as error:
        _logger.warning("the record is not signed for others: %s", error)


def _sign_statement(run: RunDirectory, manifest: Mapping[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    """Return the statement in its envelope."""
    facts = _select(manifest, "run_id", "config_sha256", "reproducibility")
    code = _select(manifest.get("code") or {}, "commit", "patch_sha256")
    results = _select(manifest["results"] or {}, "chain", "state_digest", "steps")
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in _hash_subjects(run)],
        "predicateType": _PREDICATE,
        "predicate": {**facts, "code": code, **results},
    }
    payload = json.dumps(statement, sort_keys=True).encode()
    public = _encode_public(key.public_key())
    signature = {"keyid": hashlib.sha256(public).hexdigest(), "sig": _to_base64(key.sign(_encode_signed(payload)))}
    return {"payloadType": _PAYLOAD, "payload": _to_base64(payload), "signatures": [signature]}


def _select(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def check_attestation(run: RunDirectory, key: Path | None) -> tuple[list[str], str]:
    """Check a run's statement.

    Args:
        run: The run.
        key: File with the public key of its author (PEM); None: the user's own.

    Returns:
        Contradictions between the statement and the run's files, and a remark on the signature.

    Raises:
        WorldsizeError: ``key`` is not a public key.
    """
    known = _read_public_key(key)
    if not os.path.lexists(run.attestation):
        missing = "the run has no attestation.json, so its record is not signed"
        return ([f"{missing}."], "") if key else ([], f"{missing} for others")
    try:
        envelope = parse_strict_json(read_regular(run.attestation, at_most=LARGEST))
        if envelope["payloadType"] != _PAYLOAD:
            raise ValueError(f"payloadType is not {_PAYLOAD}")
        payload = base64.b64decode(envelope["payload"], validate=True)
        signatures = [base64.b64decode(each["sig"], validate=True) for each in envelope["signatures"]]
        subjects = {each["name"]: each["digest"]["sha256"] for each in parse_strict_json(payload)["subject"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"attestation.json is damaged ({type(error).__name__}: {error})."], ""
    if not signatures:
        return ["attestation.json has no signature."], ""
    present = dict(_hash_subjects(run))
    problems = [
        f"{name} differs from the one in attestation.json."
        for name in sorted(present.keys() & subjects.keys())
        if present[name] != subjects[name]
    ]
    problems += [f"{name} is not in attestation.json." for name in sorted(present.keys() - subjects.keys())]
    if known is None:
        return problems, "the signature was not checked; pass the public key of the run's author with --key"
    if not any(_is_signed(known, each, payload) for each in signatures):
        if key is None:
            return problems, "the signature is not by this user; pass the public key of the run's author with --key"
        return [*problems, f"the signature in attestation.json was not made with the key of {key}."], ""
    return problems, "the signature is valid"


def _hash_subjects(run: RunDirectory) -> Iterator[tuple[str, str]]:
    checkpoints = [path / MANIFEST for path in complete(run.checkpoints)]
    for path in (run.manifest, run.chain, *checkpoints):
        with suppress(FileNotFoundError, NotADirectoryError):
            yield str(path.relative_to(run.path)), hash_file(path)


def _encode_signed(payload: bytes) -> bytes:
    """Return the bytes that are signed: DSSE's pre-authentication encoding of a payload."""
    kind = _PAYLOAD.encode()
    return b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload])


def _is_signed(key: Ed25519PublicKey, signature: bytes, payload: bytes) -> bool:
    try:
        key.verify(signature, _encode_signed(payload))
    except InvalidSignature:
        return False
    return True


def _read_private_key() -> Ed25519PrivateKey | None:
    """Return the user's key, created on first use together with its public file; None if it cannot be used."""
    path: Path | None = None
    try:
        path = find_key("attestation.key")
        if not path.exists():
            key = Ed25519PrivateKey.generate()
            create_key_file(
                path,
                key.private_bytes(
                    serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
                ),
            )
        found = serialization.load_pem_private_key(read_regular(path, at_most=_LONGEST_KEY), password=None)
        if isinstance(found, Ed25519PrivateKey):
            public, text = path.with_suffix(".pub"), _encode_public(found.public_key())
            if not public.exists() or public.read_bytes() != text:
                replace_file(public, text)
            return found
        raise ValueError("not an Ed25519 key")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        _logger.info("the record is not signed for others: %s", error)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: the key has a password
        _logger.warning(
            "the record is not signed for others: %s is not an Ed25519 key without a password (%s).", path, error
        )
    return None


def _read_public_key(path: Path | None) -> Ed25519PublicKey | None:
    try:
        found = serialization.load_pem_public_key(
            read_regular(path or find_key("attestation.pub"), at_most=_LONGEST_KEY)
        )
    except (OSError, RuntimeError, ValueError, UnsupportedAlgorithm) as error:
        if path is None:
            return None
        raise WorldsizeError(f"{path} is not a public key in PEM format: {error}. Pass the author's file.") from None
    if not isinstance(found, Ed25519PublicKey):
        if path is None:
            return None
        raise WorldsizeError(f"{path} is not an Ed25519 key. Pass the author's attestation.pub.")
    return found


def _encode_public(key: Ed25519PublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
