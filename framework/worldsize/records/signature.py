"""Whose manifest it is: each user's runs are signed with a key that only that user can read."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path


def signature(digest: str) -> str | None:
    """HMAC-SHA-256 (RFC 2104) of a manifest's digest; None where the user's key can be neither read nor made."""
    key = _key(Path.home() / ".config" / "worldsize" / "manifest.key")
    return hmac.new(key, digest.encode(), hashlib.sha256).hexdigest() if key else None


def is_own(digest: str, signed: str | None) -> bool:
    """Whether this user's key made the signature of the manifest with this digest."""
    expected = signature(digest)
    return bool(expected and signed and hmac.compare_digest(expected, signed))


def _key(path: Path) -> bytes | None:
    with suppress(OSError):
        if not path.exists():
            _create(path)
        return path.read_bytes()
    return None


def _create(path: Path) -> None:
    """Whole or not at all: of two runs that start at once, one key wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(secrets.token_bytes(32))
    with suppress(FileExistsError):
        os.link(temporary, path)
    temporary.unlink()
