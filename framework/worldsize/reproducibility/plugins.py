"""Files of plugins: their digest, and copies in the run folder of those that lie where other hosts may not look."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from worldsize.errors import WorldsizeError
from worldsize.reproducibility.code import LARGEST


def files_of(folder: Path) -> Iterator[Path]:
    """List the files that are recorded of a plugin, sorted: no caches, nothing hidden, nothing above 1 MiB."""
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(folder).parts)
        if not hidden and file.is_file() and os.access(file, os.R_OK) and file.stat().st_size <= LARGEST:
            yield file


def digest_of(folder: Path) -> str:
    """SHA-256 over names and contents of :func:`files_of`."""
    digest = hashlib.sha256()
    for file in files_of(folder):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{file.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def keep(folder: Path, target: Path, clean: Callable[[str], str]) -> None:
    """Copy a plugin.

    Raises:
        WorldsizeError: a file holds a secret, which ``clean`` would take out.
    """
    for file in files_of(folder):
        text = file.read_bytes().decode(errors="surrogateescape")
        if clean(text) != text:
            raise WorldsizeError(
                f"{file} holds a secret of this run, and would be copied into its folder. "
                "Have the plugin read it from the environment."
            )
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def kept_folder(root: Path, name: str) -> Path:
    """Return the folder of the plugin ``name``, such as "plugins.diloco", below ``root``."""
    return root.joinpath(*name.split("."))


def check_kept(plugins: Sequence[Mapping[str, Any]], root: Path) -> None:
    """Raise WorldsizeError unless the copies below ``root`` are those of the record."""
    for plugin in plugins:
        folder = kept_folder(root, plugin["name"])
        if plugin["kept"] and (found := digest_of(folder)) != plugin["sha256"]:
            raise WorldsizeError(
                f"{folder} is lost or was changed: its digest is {found}, the record says {plugin['sha256']}. "
                "Restore it from a copy of the run folder."
            )
