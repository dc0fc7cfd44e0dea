"""Fingerprint of the files that a recipe learns from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worldsize.errors import WorldsizeError


def fingerprint(files: Mapping[str, Path]) -> dict[str, Any]:
    """Size and SHA-256 of every file by name, and one digest over them all.

    Raises:
        WorldsizeError: a file cannot be read.
    """
    described = {name: _describe(name, files[name]) for name in sorted(files)}
    total = hashlib.sha256("".join(f"{name} {file['sha256']}\n" for name, file in described.items()).encode())
    return {"files": described, "sha256": total.hexdigest()}


def check_data(original: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Raise WorldsizeError, which names the first file that differs, unless two fingerprints are equal."""
    then, now = original["files"], present["files"]
    for name in sorted(then.keys() | now.keys()):
        if then.get(name) != now.get(name):
            raise WorldsizeError(
                f"the data file {name!r} is not the one that the run learned from: {_found(then.get(name))} then, "
                f"{_found(now.get(name))} now. Bring that file back; nothing was started."
            )


def _found(file: Mapping[str, Any] | None) -> str:
    return f"{file['size']} bytes, SHA-256 {file['sha256']}" if file else "missing"


def _describe(name: str, path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
    except OSError as error:
        raise WorldsizeError(
            f"the data file {name!r} cannot be read from {path}: {error.strerror}. Prepare the data first."
        ) from None
