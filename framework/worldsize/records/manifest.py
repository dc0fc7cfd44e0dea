"""``run_manifest.json``: the record of a run, written before its first step and amended at its end."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from worldsize.errors import WorldsizeError
from worldsize.records.goodput import goodput
from worldsize.records.lock import RunLock, is_locked
from worldsize.records.signature import signature
from worldsize.records.strict_json import strict

SCHEMA_VERSION = 1
NAME = "run_manifest.json"


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write it whole or not at all: a temporary file beside it, fsync, then a rename.

    Keys are sorted; ``digest`` is the SHA-256 of the text without ``digest`` and ``signature``.
    """
    facts = strict({**manifest, "schema_version": SCHEMA_VERSION})
    digest = _digest(facts)
    text = _text({**facts, "digest": digest, "signature": signature(digest)})
    temporary = path.with_name(f".manifest_{secrets.token_hex(4)}")
    try:
        with temporary.open("x") as file:  # tempfile would make it unreadable for other users
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _text(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=2, sort_keys=True, allow_nan=False) + "\n"


def _digest(manifest: Mapping[str, Any]) -> str:
    facts = {key: value for key, value in manifest.items() if key not in ("digest", "signature")}
    return hashlib.sha256(_text(facts).encode()).hexdigest()


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest.

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
    if manifest.get("digest") != (found := _digest(manifest)) or _text(manifest) != text:
        raise WorldsizeError(
            f"{path} was edited after it was written: its digest is {found}, it says {manifest.get('digest')}. "
            "Take the original from a copy of the run."
        )
    return dict(manifest)


def begin_attempt(path: Path, *, hosts: list[str], world_size: int, job: dict[str, Any] | None = None) -> int:
    """Note that the run is being started; the number of this attempt. ``job``: that of a scheduler, if there is one."""
    manifest = _amend(path.parent)  # what the attempt before could not say itself; the caller holds the run's lock
    attempt = {
        "number": len(manifest["attempts"]) + 1,
        "start": now(),
        "start_at": time.time(),
        "end": None,
        "end_at": None,
        "steps": None,
        "first_step_at": None,
        "exit_reason": "running",
        "exit_code": None,
        "hosts": hosts,
        "world_size": world_size,
        "pid": os.getpid(),
        **({"job": job} if job else {}),
    }
    write_manifest(path, {**manifest, "attempts": [*manifest["attempts"], attempt]})
    return len(manifest["attempts"]) + 1


def note_job(path: Path, name: str) -> None:
    """A scheduler has taken the run as the job ``name``."""
    manifest = read_manifest(path)
    write_manifest(path, {**manifest, "jobs": [*manifest.get("jobs", []), {"id": name, "submitted": now()}]})


def end_attempt(path: Path, results: Mapping[str, Any], **facts: Any) -> dict[str, Any]:
    """Note ``facts`` of the last attempt (exit_reason and exit_code at least), and what came of the run.

    The results, with the goodput of all attempts.
    """
    manifest = _ended(read_manifest(path), end=now(), end_at=time.time(), **facts)
    noted = {**results, "goodput": goodput(manifest["attempts"])}
    write_manifest(path, {**manifest, "results": noted})
    return noted


def look(run_dir: Path) -> dict[str, Any]:
    """The manifest of a run; one that says "running" while no process holds the lock is amended to "killed".

    A manifest that cannot be written, by this user or on a full disk, is returned as it is.
    """
    manifest = read_manifest(run_dir / NAME)
    if _says_running(manifest) and not is_locked(run_dir):
        with suppress(WorldsizeError, OSError), RunLock(run_dir):
            _amend(run_dir)
    return read_manifest(run_dir / NAME)


def _amend(run_dir: Path) -> dict[str, Any]:
    """The manifest; under the lock, and read again: the run may have ended in good order since it was first read."""
    manifest = read_manifest(run_dir / NAME)
    if _says_running(manifest):
        last = _last_sign(run_dir)
        end = datetime.fromtimestamp(last, UTC).isoformat(timespec="seconds")
        manifest = _ended(manifest, end=end, end_at=last, exit_reason="killed", exit_code=None)
        write_manifest(run_dir / NAME, manifest)
    return manifest


def _says_running(manifest: Mapping[str, Any]) -> bool:
    return bool(manifest["attempts"]) and manifest["attempts"][-1]["exit_reason"] == "running"


def _ended(manifest: dict[str, Any], **facts: Any) -> dict[str, Any]:
    *earlier, last = manifest["attempts"]
    return {**manifest, "attempts": [*earlier, {**last, **facts}]}


def _last_sign(run_dir: Path) -> float:
    """Unix time at which the run last wrote."""
    return max(file.stat().st_mtime for file in run_dir.rglob("*") if file.is_file())


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
