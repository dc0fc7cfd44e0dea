"""Fingerprint of the files that a recipe learns from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def fingerprint(files: Mapping[str, Path]) -> dict[str, Any]:
    """Size and SHA-256 of every file by name, and one digest over them all."""
    described = {name: _describe(files[name]) for name in sorted(files)}
    total = hashlib.sha256("".join(f"{name} {file['sha256']}\n" for name, file in described.items()).encode())
    return {"files": described, "sha256": total.hexdigest()}


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
