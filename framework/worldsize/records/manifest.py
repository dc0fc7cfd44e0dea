"""The format of ``run_manifest.json``: canonical JSON with a digest, signed by the user who wrote it."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worldsize.errors import WorldsizeError
from worldsize.records.signature import signature
from worldsize.records.strict_json import strict

SCHEMA_VERSION = 1


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Write the manifest whole or not at all, and return it as it was written.

    A temporary file beside it is written, synced, then renamed.

    Keys are sorted; ``digest`` is the SHA-256 of the text without ``digest`` and ``signature``.
    """
    facts = strict({**manifest, "schema_version": SCHEMA_VERSION})
    digest = _digest(facts)
    written = {**facts, "digest": digest, "signature": signature(digest)}
    temporary = path.with_name(f".manifest_{secrets.token_hex(4)}")
    try:
        with temporary.open("x") as file:  # tempfile would make it unreadable for other users
            file.write(_text(written))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    return written


def _text(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _digest(manifest: Mapping[str, Any]) -> str:
    facts = {key: value for key, value in manifest.items() if key not in ("digest", "signature")}
    return hashlib.sha256(_text(facts).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest and check its digest.

    Raises:
        WorldsizeError: it is missing, not JSON, of a newer schema, or not as worldsize wrote it.
    """
    try:
        text = path.read_text()
        manifest = json.loads(text)
        version = int(manifest["schema_version"])
    except OSError as error:
        raise WorldsizeError(f"{path} cannot be read: {error.strerror}. Name the folder of a run.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise WorldsizeError(f"{path} is not a run manifest, or was edited: {error}.") from None
    if version > SCHEMA_VERSION:
        raise WorldsizeError(
            f"{path} has schema version {version}; this worldsize reads up to {SCHEMA_VERSION}. Upgrade worldsize."
        )
    if manifest.get("digest") != (digest := _digest(manifest)) or _text(manifest) != text:
        raise WorldsizeError(
            f"{path} was edited after it was written: its digest is {digest}, it says {manifest.get('digest')}. "
            "Take the original from a copy of the run."
        )
    return dict(manifest)
