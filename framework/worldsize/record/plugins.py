"""Digests the files of plugins, and copies plugins that other hosts may lack into the run folder."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from worldsize.errors import WorldsizeError
from worldsize.files import read_regular
from worldsize.messages import printable
from worldsize.record.code import LARGEST
from worldsize.record.private_files import why_private


def files_of(folder: Path) -> Iterator[Path]:
    """List a plugin's recorded files, sorted: no caches, hidden files or files above 1 MiB."""
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(folder).parts)
        if not hidden and file.is_file() and os.access(file, os.R_OK) and file.stat().st_size <= LARGEST:
            yield file


def digest_of(folder: Path) -> str:
    """Return the SHA-256 over names and contents of :func:`files_of`."""
    digest = hashlib.sha256()
    for file in files_of(folder):
        content = hashlib.sha256(read_regular(file, at_most=LARGEST)).hexdigest()
        digest.update(f"{file.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def copy_files(folder: Path, target: Path) -> None:
    """Copy the recorded files of a plugin.

    Raises:
        WorldsizeError: a file is a link, which may lead anywhere.
    """
    for file in files_of(folder):
        if file.is_symlink():
            raise WorldsizeError(f"{printable(str(file))} is a link, and may lead anywhere. Put the file in its place.")
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def keep(folder: Path, target: Path, clean: Callable[[str], str], *, include: Sequence[str] = ()) -> None:
    """Copy a plugin.

    ``include``: patterns of files that are copied although they seem to be private.

    Raises:
        WorldsizeError: a file seems to be private, or contains a secret that ``clean`` would remove.
    """
    for file in files_of(folder):
        name = file.relative_to(folder).as_posix()
        if (reason := why_private(file, name, include=include)) is not None:
            raise WorldsizeError(
                f"{file} seems to be private ({reason}), and would be copied into the run's folder. "
                f"Take it out of the plugin, or say that it may be: run.include='[{name}]'."
            )
        text = read_regular(file, at_most=LARGEST).decode(errors="surrogateescape")
        if clean(text) != text:
            raise WorldsizeError(
                f"{file} holds a secret of this run, and would be copied into its folder. "
                "Have the plugin read it from the environment."
            )
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def kept_folder(root: Path, name: str) -> Path:
    """Return the folder of the plugin ``name``, such as "plugins.diloco", below ``root``.

    Raises:
        WorldsizeError: the name is not a module name.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        raise WorldsizeError(f"the record lists the plugin {name!r}, which is no name of a module. Do not trust it.")
    return root.joinpath(*name.split("."))


def remove_compiled(root: Path) -> None:
    """Remove compiled files, which would be imported in place of the verified sources."""
    for cache in list(root.rglob("__pycache__")):
        if cache.is_symlink():
            cache.unlink()
        else:
            shutil.rmtree(cache, ignore_errors=True)


def check_kept(plugins: Sequence[Mapping[str, Any]], root: Path) -> bool:
    """Check that ``root`` contains exactly the recorded copies of ``plugins``; return whether there are any.

    Compiled files are removed.

    Raises:
        WorldsizeError: a copy is missing or was changed, or a file is not in the record.
    """
    if root.is_symlink():
        raise WorldsizeError(f"{printable(str(root))} is a link, which worldsize did not make. Take it away.")
    remove_compiled(root)
    folders = [kept_folder(root, plugin["name"]) for plugin in plugins if plugin["kept"]]
    recorded = [plugin["sha256"] for plugin in plugins if plugin["kept"]]
    for folder, wanted in zip(folders, recorded, strict=True):
        if (digest := digest_of(folder)) != wanted:
            raise WorldsizeError(
                f"{folder} is lost or was changed: its digest is {digest}, the record says {wanted}. "
                "Restore it from a copy of the run folder."
            )
    listed = {file for folder in folders for file in files_of(folder)}
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or (not path.is_dir() and path not in listed):
            raise WorldsizeError(
                f"{printable(str(path))} is not in the record of the run, and would be imported. "
                "Take it away, if you do not know it; nothing was started."
            )
    return bool(folders)
