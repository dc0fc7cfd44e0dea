"""Fingerprints of a run's data files and plugins.

Plugins that may be missing on other hosts are copied into the run folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from worldsize.core import Recipe
from worldsize.errors import WorldsizeError
from worldsize.files import read_regular
from worldsize.messages import printable
from worldsize.record.code import LARGEST
from worldsize.record.redaction import why_private


def fingerprint(files: Mapping[str, Path], others: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Return size, SHA-256 and relative path of every file, and a combined digest.

    Args:
        files: paths by name; the files are read in full.
        others: fingerprints by name, for data that provide their own size and digest.

    Raises:
        WorldsizeError: a file cannot be read.
    """
    described = {name: _describe(name, files[name]) for name in sorted(files)}
    described |= {name: dict(other) for name, other in sorted((others or {}).items())}
    total = hashlib.sha256("".join(f"{name} {file['sha256']}\n" for name, file in described.items()).encode())
    return {"files": described, "sha256": total.hexdigest()}


def recipe_fingerprint(recipe: Recipe) -> dict[str, Any]:
    """Return the fingerprint of all training data of ``recipe``.

    Raises:
        WorldsizeError: the data cannot be read.
    """
    return fingerprint(recipe.files(), recipe.fingerprints())


def check_data(original: Mapping[str, Any], present: Mapping[str, Any], *, remedy: str = "Restore the file") -> None:
    """Raise WorldsizeError, naming the first file that differs, if the fingerprints differ."""
    then, now = original["files"], present["files"]
    for name in sorted(then.keys() | now.keys()):
        if _get_content(then.get(name)) != _get_content(now.get(name)):
            raise WorldsizeError(
                f"the data file {name!r} has changed: recorded {_format_file(then.get(name))}, "
                f"found {_format_file(now.get(name))}. {remedy}; nothing was started."
            )


def _get_content(file: Mapping[str, Any] | None) -> tuple[int, str] | None:
    return (file["size"], file["sha256"]) if file else None


def link_data(data: Mapping[str, Any], folder: Path, root: Path, sources: Sequence[Path]) -> None:
    """Create symbolic links to data files that a checkout lacks because git does not track them.

    Args:
        data: Fingerprint of the data. Only files with relative paths are linked.
        folder: Working directory in the checkout, to which the paths are relative.
        root: The checkout; links are only created inside it.
        sources: Folders to search for the relative paths; files with a different size or digest are not linked.
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


def _format_file(file: Mapping[str, Any] | None) -> str:
    return f"{file['size']} bytes, SHA-256 {file['sha256']}" if file else "missing"


def _describe(name: str, path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
            return content if path.is_absolute() else {**content, "path": str(path)}
    except OSError as error:
        raise WorldsizeError(
            f"failed to read the data file {name!r} from {path}: {error.strerror}. Prepare the data first."
        ) from None


def list_plugin_files(folder: Path) -> Iterator[Path]:
    """Yield a plugin's recorded files: readable, not hidden or in a cache, and at most 1 MiB."""
    for file in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(folder).parts)
        if not hidden and file.is_file() and os.access(file, os.R_OK) and file.stat().st_size <= LARGEST:
            yield file


def compute_plugin_digest(folder: Path) -> str:
    """Return a SHA-256 of the names and contents of a plugin's recorded files."""
    digest = hashlib.sha256()
    for file in list_plugin_files(folder):
        content = hashlib.sha256(read_regular(file, at_most=LARGEST)).hexdigest()
        digest.update(f"{file.relative_to(folder).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def copy_files(folder: Path, target: Path) -> None:
    """Copy the recorded files of a plugin.

    Raises:
        WorldsizeError: a file is a symbolic link, which may lead outside.
    """
    for file in list_plugin_files(folder):
        if file.is_symlink():
            raise WorldsizeError(
                f"{printable(str(file))} is a symbolic link, possibly to an outside file. Replace the link with the "
                "file."
            )
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def copy_plugin(folder: Path, target: Path, clean: Callable[[str], str], *, include: Sequence[str] = ()) -> None:
    """Copy a plugin to the run folder; ``include``: patterns of private-looking files to allow.

    Raises:
        WorldsizeError: a file seems private, or contains a secret that ``clean`` would remove.
    """
    for file in list_plugin_files(folder):
        name = file.relative_to(folder).as_posix()
        if (reason := why_private(file, name, include=include)) is not None:
            raise WorldsizeError(
                f"{file} may be private ({reason}), and would be copied into the run folder. "
                f"Remove the file from the plugin, or set run.include='[{name}]'."
            )
        text = read_regular(file, at_most=LARGEST).decode(errors="surrogateescape")
        if clean(text) != text:
            raise WorldsizeError(
                f"{file} contains a secret of this run, and would be copied into the run folder. "
                "Read the secret from an environment variable in the plugin."
            )
        copy = target / file.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def get_plugin_folder(root: Path, name: str) -> Path:
    """Return the folder for the copy of the plugin ``name``, such as "plugins.diloco".

    Raises:
        WorldsizeError: the name is not a module name.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name):
        raise WorldsizeError(
            f"invalid plugin name {name!r} in the record: not a module name. Do not trust this record."
        )
    return root.joinpath(*name.split("."))


def remove_compiled(root: Path) -> None:
    """Remove compiled files, so that Python only imports the verified sources."""
    for cache in list(root.rglob("__pycache__")):
        if cache.is_symlink():
            cache.unlink()
        else:
            shutil.rmtree(cache, ignore_errors=True)


def check_kept(plugins: Sequence[Mapping[str, Any]], root: Path) -> bool:
    """Check that ``root`` has exactly the recorded plugin copies; return whether there are any.

    Removes compiled files.

    Raises:
        WorldsizeError: a copy is missing or was changed, or a file is not in the record.
    """
    if root.is_symlink():
        raise WorldsizeError(f"{printable(str(root))} is a symbolic link not created by worldsize. Remove the link.")
    remove_compiled(root)
    folders = [get_plugin_folder(root, plugin["name"]) for plugin in plugins if plugin["kept"]]
    recorded = [plugin["sha256"] for plugin in plugins if plugin["kept"]]
    for folder, wanted in zip(folders, recorded, strict=True):
        if (digest := compute_plugin_digest(folder)) != wanted:
            raise WorldsizeError(
                f"{folder} is missing or was changed: expected digest {wanted}, got {digest}. "
                "Restore the folder from a copy of the run folder."
            )
    listed = {file for folder in folders for file in list_plugin_files(folder)}
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or (not path.is_dir() and path not in listed):
            raise WorldsizeError(
                f"{printable(str(path))} is not in the run's record, and would be imported. "
                "Remove the file if it is not yours; nothing was started."
            )
    return bool(folders)
