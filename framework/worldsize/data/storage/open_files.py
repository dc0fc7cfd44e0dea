"""Finds the files that a path, a pattern or a URL names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from worldsize.data.storage.byte_files import ByteFile, LocalFile, reason_of, without_secrets
from worldsize.data.storage.cache import Cache
from worldsize.data.storage.remote_files import RemoteFile, RemoteSystem, version
from worldsize.errors import ConfigError

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def open_files(paths: str | Sequence[str], cache: Cache, *, endings: Sequence[str] = ("",)) -> list[ByteFile]:
    """Return the files that ``paths`` name, those of a folder or a pattern in the order of their names.

    Args:
        paths: one or several files, folders, or patterns such as ``books-*.jsonl`` and ``books-{000..031}.tar``: paths
            of this machine, or URLs of any file system that fsspec knows.
        cache: keeps what is read of URLs.
        endings: of the names that count in a folder, such as ``.jsonl``.

    Raises:
        ConfigError: there is no such file, or no access to it.
    """
    named = [paths] if isinstance(paths, str) else paths
    if not named:
        raise ConfigError("data.path is an empty list. Name a file, a folder or a pattern.")
    return [file for path in named for each in expanded(path) for file in _files_of(each, cache, tuple(endings))]


def is_url(path: str) -> bool:
    """Return whether ``path`` is a URL of other than this machine's file system."""
    return "://" in path and not path.startswith("file://")


def local_path(path: str) -> Path:
    """Return the absolute path of a file or folder of this machine, which may be given as a ``file://`` URL.

    Raises:
        ConfigError: the path is empty, or begins with an unknown user.
    """
    if not (plain := path.removeprefix("file://")):
        raise ConfigError("data.path is empty. Name a file, a folder or a pattern.")
    try:
        return Path(plain).expanduser().absolute()
    except RuntimeError as error:  # ~USER
        raise unopened(path, str(error)) from None


def expanded(path: str) -> Iterator[str]:
    """Yield what a path with a range of numbers in braces stands for, such as ``{000..031}``.

    Raises:
        ConfigError: a range counts down.
    """
    match = _RANGE.search(path)
    if match is None or (not is_url(path) and os.path.lexists(local_path(path))):
        yield path
        return
    first, last = int(match[1]), int(match[2])
    if first > last:
        raise ConfigError(
            f"{without_secrets(path)}: the range {match[0]} counts down, and names no file. "
            f"Write {{{match[2]}..{match[1]}}}."
        )
    for number in range(first, last + 1):
        yield from expanded(path[: match.start()] + str(number).zfill(len(match[1])) + path[match.end() :])


def _files_of(path: str, cache: Cache, endings: tuple[str, ...]) -> Sequence[ByteFile]:
    try:
        files = _remote(path, cache, endings) if is_url(path) else _local(local_path(path), endings)
    except (OSError, ValueError) as error:  # ValueError: a pattern such as a**b
        raise unopened(path, reason_of(error)) from None
    if not files:
        inside = "" if endings == ("",) else f", or no file in it that ends with {' or '.join(endings)}"
        raise ConfigError(f"{without_secrets(path)}: there is no such file{inside}. Check the path of the data.")
    return files


def unopened(path: str, reason: str) -> ConfigError:
    """Return the error of a path or URL that cannot be opened."""
    return ConfigError(
        f"{without_secrets(path)}: it cannot be opened: {reason.rstrip('.')}. Check the path of the data."
    )


def _local(path: Path, endings: tuple[str, ...]) -> Sequence[ByteFile]:
    if path.is_file():
        return [LocalFile(path)]
    if path.is_dir():
        inside = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
        return [LocalFile(name) for name in sorted(inside) if name.name.endswith(endings)]
    anchor = Path(path.anchor)
    return [LocalFile(name) for name in sorted(anchor.glob(str(path.relative_to(anchor)))) if name.is_file()]


def _remote(url: str, cache: Cache, endings: tuple[str, ...]) -> Sequence[ByteFile]:
    opened, path = open_system(url)
    system = opened.here()
    try:
        if "*" in path:
            infos = {name: facts for name, facts in system.glob(path, detail=True).items() if _is_file(facts)}
        elif path.endswith("/") or (facts := system.info(path))["type"] == "directory":
            listed = system.find(path, detail=True)
            infos = {name: facts for name, facts in listed.items() if name.endswith(endings)}
        else:
            infos = {path: facts}
        for name, facts in infos.items():
            if facts.get("size") is None or not version(facts):  # some lists lack what a file's own description has
                infos[name] = system.info(name)
        return [RemoteFile(opened, name, infos[name], cache) for name in sorted(infos, key=_parts)]
    except ConfigError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise unopened(url, reason_of(error)) from None


def _is_file(facts: Mapping[str, Any]) -> bool:
    return bool(facts["type"] != "directory")


def _parts(name: str) -> list[str]:
    """Return what a name is sorted by, so that a copied folder has the order of the one here."""
    return name.split("/")


def open_system(url: str) -> tuple[RemoteSystem, str]:
    """Return the file system of fsspec that a URL is of, and the path in it.

    Raises:
        ConfigError: there is none, or what it needs is not installed.
    """
    import fsspec  # it takes a tenth of a second, and only URLs need it

    try:
        system, path = fsspec.core.url_to_fs(url)
    except Exception as error:  # also of the library that a file system needs
        raise unopened(url, reason_of(error)) from None
    return RemoteSystem(system), str(path)
