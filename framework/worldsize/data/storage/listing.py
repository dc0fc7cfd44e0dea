"""Resolution of paths, patterns and URLs to files, and listing of large folders.

The file names in a :class:`Folder` are stored in an index, so that the folder is listed only once.
"""

from __future__ import annotations

import hashlib
import os
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from worldsize.data.storage.byte_files import COUNTS, ByteFile, LocalFile, SampleError, format_reason, strip_secrets
from worldsize.data.storage.cache import Cache, RemoteFile, RemoteSystem, extract_version
from worldsize.errors import ConfigError, WorldsizeError

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def open_files(paths: str | Sequence[str], cache: Cache, *, endings: Sequence[str] = ("",)) -> list[ByteFile]:
    """Resolve ``paths`` to files; the files in each folder or pattern are sorted by name.

    Args:
        paths: one or more files, folders, or patterns such as ``books-*.jsonl`` and ``books-{000..031}.tar``, as local
            paths or URLs of any fsspec file system.
        cache: stores data read from URLs.
        endings: file name endings to include from folders, such as ``.jsonl``.

    Raises:
        ConfigError: a file does not exist or cannot be accessed.
    """
    named = [paths] if isinstance(paths, str) else paths
    if not named:
        raise ConfigError("data.path is an empty list. Set it to a file, folder or pattern.")
    return [
        file for path in named for each in expand_ranges(path) for file in _resolve_files(each, cache, tuple(endings))
    ]


def is_url(path: str) -> bool:
    """Return whether ``path`` is a URL other than ``file://``."""
    return "://" in path and not path.startswith("file://")


def local_path(path: str) -> Path:
    """Return the absolute path of a local file or folder, given as a path or ``file://`` URL.

    Raises:
        ConfigError: the path is empty, or starts with ``~USER`` for an unknown user.
    """
    if not (plain := path.removeprefix("file://")):
        raise ConfigError("data.path is empty. Set it to a file, folder or pattern.")
    try:
        return Path(plain).expanduser().absolute()
    except RuntimeError as error:  # unknown user
        raise create_open_error(path, str(error)) from None


def expand_ranges(path: str) -> Iterator[str]:
    """Expand integer ranges such as ``{000..031}``, unless a local file has that name.

    Raises:
        ConfigError: a range is descending.
    """
    match = _RANGE.search(path)
    if match is None or (not is_url(path) and os.path.lexists(local_path(path))):
        yield path
        return
    first, last = int(match[1]), int(match[2])
    if first > last:
        raise ConfigError(f"{strip_secrets(path)}: the range {match[0]} is descending. Use {{{match[2]}..{match[1]}}}.")
    for number in range(first, last + 1):
        yield from expand_ranges(path[: match.start()] + str(number).zfill(len(match[1])) + path[match.end() :])


def _resolve_files(path: str, cache: Cache, endings: tuple[str, ...]) -> Sequence[ByteFile]:
    try:
        files = _remote_files(path, cache, endings) if is_url(path) else _local_files(local_path(path), endings)
    except (OSError, ValueError) as error:  # ValueError: a pattern such as a**b
        raise create_open_error(path, format_reason(error)) from None
    if not files:
        inside = "" if endings == ("",) else f", or no {' or '.join(endings)} files in the folder"
        raise ConfigError(f"{strip_secrets(path)}: no such file{inside}. Check the data path.")
    return files


def create_open_error(path: str, reason: str) -> ConfigError:
    """Return the error for a path or URL that cannot be opened."""
    return ConfigError(f"failed to open {strip_secrets(path)}: {reason.rstrip('.')}. Check the data path.")


def _local_files(path: Path, endings: tuple[str, ...]) -> Sequence[ByteFile]:
    if path.is_file():
        return [LocalFile(path)]
    if path.is_dir():
        inside = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
        return [LocalFile(name) for name in sorted(inside) if name.name.endswith(endings)]
    anchor = Path(path.anchor)
    return [LocalFile(name) for name in sorted(anchor.glob(str(path.relative_to(anchor)))) if name.is_file()]


def _remote_files(url: str, cache: Cache, endings: tuple[str, ...]) -> Sequence[ByteFile]:
    opened, path = open_system(url)
    system = opened.get_system()
    try:
        if "*" in path:
            infos = {name: facts for name, facts in system.glob(path, detail=True).items() if _is_file(facts)}
        elif path.endswith("/") or (facts := system.info(path))["type"] == "directory":
            listed = system.find(path, detail=True)
            infos = {name: facts for name, facts in listed.items() if name.endswith(endings)}
        else:
            infos = {path: facts}
        for name, facts in infos.items():
            if facts.get("size") is None or not extract_version(facts):  # some listings lack metadata that info() has
                infos[name] = system.info(name)
        return [RemoteFile(opened, name, infos[name], cache) for name in sorted(infos, key=_split_path)]
    except ConfigError:
        raise
    except Exception as error:  # each file system raises different errors
        raise create_open_error(url, format_reason(error)) from None


def _is_file(facts: Mapping[str, Any]) -> bool:
    return bool(facts["type"] != "directory")


def _split_path(name: str) -> list[str]:
    """Return a sort key for remote paths that gives the same order as for local paths."""
    return name.split("/")


def open_system(url: str) -> tuple[RemoteSystem, str]:
    """Return the fsspec file system of a URL, and the path within it.

    Raises:
        ConfigError: the file system does not exist, or requires a package that is not installed.
    """
    import fsspec  # takes 0.1 s and is only needed for URLs

    try:
        system, path = fsspec.core.url_to_fs(url)
    except Exception as error:  # file systems and their libraries raise any error
        raise create_open_error(url, format_reason(error)) from None
    return RemoteSystem(system), str(path)


class Folder(ByteFile):
    """A folder treated as one file, without subfolders.

    Its many files do not need an object each. The stamp changes when files are added or removed.
    """

    size = 0

    def _read_bytes(self, start: int, stop: int) -> bytes:
        raise IsADirectoryError(0, "is a folder")

    @abstractmethod
    def list_sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the name and the size in bytes of each file, sorted by name."""

    @abstractmethod
    def read_file(self, name: str, size: int) -> bytes:
        """Read a full file in the folder; ``size`` is its size in bytes when it was indexed.

        Raises:
            SampleError: the file is missing, or its size has changed.
        """


@final
class LocalFolder(Folder):
    """A local folder; its stamp is its modification time."""

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)
        self.stamp = str(path.stat().st_mtime_ns)

    def list_sizes(self) -> Iterator[tuple[str, int]]:
        for path in sorted(self._path.iterdir()):
            if path.is_file():
                yield path.name, path.stat().st_size

    def read_file(self, name: str, size: int) -> bytes:
        try:
            with open(f"{self.name}/{name}", "rb", buffering=0) as file:  # noqa: PTH123  # Path.open is slower than reading
                data = file.read(size + 1)
        except OSError as error:
            raise SampleError(f"{self.name}/{name}, byte 0: read failed: {error.strerror}.") from None
        if len(data) != size:
            changed = "longer" if len(data) > size else "shorter"
            raise SampleError(
                f"{self.name}/{name}, byte {min(size, len(data))}: the file is {changed} than the {size:,} bytes "
                "recorded in the index. Restore the file, or touch the folder to rebuild the index."
            )
        COUNTS.read += size
        return data


@final
class RemoteFolder(Folder):
    """A remote folder; its stamp is a digest of its file list.

    Args:
        facts: the file system's metadata of the files; not stored, since there may be many files.
    """

    def __init__(self, system: RemoteSystem, path: str, facts: Sequence[Mapping[str, Any]], cache: Cache) -> None:
        self._system, self._path, self._cache = system, path.rstrip("/"), cache
        self.name = strip_secrets(system.get_system().unstrip_protocol(self._path))
        described = "".join(sorted(f"{each['name']} {each.get('size')} {extract_version(each)}\n" for each in facts))
        self.stamp = hashlib.sha256(described.encode()).hexdigest()

    def list_sizes(self) -> Iterator[tuple[str, int]]:
        system = self._system.get_system()
        listed = system.ls(self._path, detail=True)
        system.invalidate_cache()  # would keep all listings in memory
        for each in sorted(listed, key=lambda each: str(each["name"])):
            if each["type"] == "file":
                size = each["size"] if each.get("size") is not None else system.info(each["name"])["size"]
                yield each["name"].rpartition("/")[2], int(size)

    def read_file(self, name: str, size: int) -> bytes:
        facts = {"size": size, "ETag": self.stamp}
        return RemoteFile(self._system, f"{self._path}/{name}", facts, self._cache).read(0, size)


def walk_folders(path: str, cache: Cache) -> Iterator[tuple[Folder, tuple[str, ...]]]:
    """Yield a folder and all subfolders, sorted, with the components of their relative paths.

    Hidden folders (with names that begin with a dot) are omitted.

    Raises:
        ConfigError: the folder does not exist or cannot be accessed.
    """
    try:
        yield from _remote_folders(path, cache) if is_url(path) else _local_folders(local_path(path))
    except WorldsizeError:
        raise
    except Exception as error:  # each file system raises different errors
        raise create_open_error(path, format_reason(error)) from None


def _local_folders(root: Path) -> Iterator[tuple[Folder, tuple[str, ...]]]:
    seen = set()
    if not root.is_dir():
        raise create_open_error(str(root), "no such folder")
    for name, folders, _ in os.walk(root, followlinks=True):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        path = Path(name)
        if (real := path.resolve()) in seen:  # already visited through a link
            folders.clear()
            continue
        seen.add(real)
        yield LocalFolder(path), path.relative_to(root).parts


def _remote_folders(url: str, cache: Cache) -> Iterator[tuple[Folder, tuple[str, ...]]]:
    opened, root = open_system(url)
    system = opened.get_system()

    def walk_subfolders(path: str, parts: tuple[str, ...]) -> Iterator[tuple[Folder, tuple[str, ...]]]:
        listed = system.ls(path, detail=True)
        system.invalidate_cache()
        yield RemoteFolder(opened, path, [each for each in listed if each["type"] == "file"], cache), parts
        folders = {each["name"].rstrip("/").rpartition("/")[2]: each["name"] for each in listed if is_below(each, path)}
        for name in sorted(folders):
            if not name.startswith("."):
                yield from walk_subfolders(folders[name], (*parts, name))

    def is_below(each: Mapping[str, Any], path: str) -> bool:
        return bool(each["type"] == "directory" and each["name"].rstrip("/") != path.rstrip("/"))

    yield from walk_subfolders(root, ())
