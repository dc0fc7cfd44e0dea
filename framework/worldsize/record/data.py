"""Fingerprints the files that a recipe learns from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from worldsize.core import Recipe
from worldsize.errors import WorldsizeError


def fingerprint(files: Mapping[str, Path], others: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return size and SHA-256 of every file by name, and one digest over all; the path of one that was given relative.

    Args:
        files: they are read whole.
        others: data by name that provide their own size and digest.

    Raises:
        WorldsizeError: a file cannot be read.
    """
    described = {name: _describe(name, files[name]) for name in sorted(files)}
    described |= {name: dict(other) for name, other in sorted((others or {}).items())}
    total = hashlib.sha256("".join(f"{name} {file['sha256']}\n" for name, file in described.items()).encode())
    return {"files": described, "sha256": total.hexdigest()}


def recipe_fingerprint(recipe: Recipe) -> dict[str, Any]:
    """Return the fingerprint of all data that ``recipe`` learns from.

    Raises:
        WorldsizeError: they cannot be read.
    """
    return fingerprint(recipe.files(), recipe.fingerprints())


def check_data(
    original: Mapping[str, Any], present: Mapping[str, Any], *, remedy: str = "Bring that file back"
) -> None:
    """Raise WorldsizeError with the name of the first file that differs, unless two fingerprints are equal."""
    then, now = original["files"], present["files"]
    for name in sorted(then.keys() | now.keys()):
        if _content(then.get(name)) != _content(now.get(name)):
            raise WorldsizeError(
                f"the data file {name!r} is not the one that the run learned from: {_described(then.get(name))} then, "
                f"{_described(now.get(name))} now. {remedy}; nothing was started."
            )


def _content(file: Mapping[str, Any] | None) -> tuple[int, str] | None:
    return (file["size"], file["sha256"]) if file else None


def link_data(data: Mapping[str, Any], folder: Path, root: Path, sources: Sequence[Path]) -> None:
    """Link the data files that a checkout lacks, since git does not track them, from their sources.

    Args:
        data: A fingerprint. Files whose path was not relative need no link.
        folder: Folder in the checkout in which the program runs, to which their paths are relative.
        root: The checkout, outside of which no link is made.
        sources: Folders to which the paths may be relative here; a file with another digest is left alone.
    """
    for file in data["files"].values():
        if (given := file.get("path")) is None:
            continue
        link = folder / given
        if link.exists() or not link.resolve().is_relative_to(root.resolve()):
            continue
        there = next((source / given for source in sources if _is_same(source / given, file)), None)
        if there is not None:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(there.resolve())


def _is_same(path: Path, file: Mapping[str, Any]) -> bool:
    try:
        with path.open("rb") as content:
            size = path.stat().st_size
            return size == file["size"] and hashlib.file_digest(content, "sha256").hexdigest() == str(file["sha256"])
    except OSError:
        return False


def _described(file: Mapping[str, Any] | None) -> str:
    return f"{file['size']} bytes, SHA-256 {file['sha256']}" if file else "missing"


def _describe(name: str, path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
            return content if path.is_absolute() else {**content, "path": str(path)}
    except OSError as error:
        raise WorldsizeError(
            f"the data file {name!r} cannot be read from {path}: {error.strerror}. Prepare the data first."
        ) from None
