"""Folders of many files, of which an index knows the names, so that no process has to list them."""

from __future__ import annotations

import hashlib
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from worldsize.data.storage.byte_files import ByteFile, SampleError, reason_of, without_secrets
from worldsize.data.storage.cache import Cache
from worldsize.data.storage.open_files import is_url, local_path, open_system, unopened
from worldsize.data.storage.read_counts import COUNTS
from worldsize.data.storage.remote_files import RemoteFile, RemoteSystem, version
from worldsize.errors import WorldsizeError


class Folder(ByteFile):
    """A folder that stands for the files in it, but not for those in folders below it.

    Its stamp changes when files come and go.
    """

    size = 0

    def _read(self, start: int, stop: int) -> bytes:
        raise IsADirectoryError(0, "it is a folder")

    @abstractmethod
    def sizes(self) -> Iterator[tuple[str, int]]:
        """Yield the name of each file and its bytes, in the order of the names."""

    @abstractmethod
    def content(self, name: str, size: int) -> bytes:
        """Read a whole file of the folder, which had ``size`` bytes when it was indexed.

        Raises:
            SampleError: it is not there, or has another size.
        """


@final
class LocalFolder(Folder):
    """A folder of this machine, whose time of change is its stamp."""

    def __init__(self, path: Path) -> None:
        self._path, self.name = path, str(path)
        self.stamp = str(path.stat().st_mtime_ns)

    def sizes(self) -> Iterator[tuple[str, int]]:
        for path in sorted(self._path.iterdir()):
            if path.is_file():
                yield path.name, path.stat().st_size

    def content(self, name: str, size: int) -> bytes:
        try:
            with open(f"{self.name}/{name}", "rb", buffering=0) as file:  # noqa: PTH123  # a Path takes longer than to read
                data = file.read(size + 1)
        except OSError as error:
            raise SampleError(f"{self.name}/{name}, byte 0: it cannot be read: {error.strerror}.") from None
        if len(data) != size:
            changed = "longer" if len(data) > size else "shorter"
            raise SampleError(
                f"{self.name}/{name}, byte {min(size, len(data))}: it is {changed} than the {size:,} bytes that it had "
                "when the folder was indexed. Bring it back, or touch its folder."
            )
        COUNTS.read += size
        return data


@final
class RemoteFolder(Folder):
    """A folder of another machine, whose stamp is a digest of its list of files.

    Args:
        facts: what the file system says of each file; not kept, since there may be many.
    """

    def __init__(self, system: RemoteSystem, path: str, facts: Sequence[Mapping[str, Any]], cache: Cache) -> None:
        self._system, self._path, self._cache = system, path.rstrip("/"), cache
        self.name = without_secrets(system.here().unstrip_protocol(self._path))
        described = "".join(sorted(f"{each['name']} {each.get('size')} {version(each)}\n" for each in facts))
        self.stamp = hashlib.sha256(described.encode()).hexdigest()

    def sizes(self) -> Iterator[tuple[str, int]]:
        system = self._system.here()
        listed = system.ls(self._path, detail=True)
        system.invalidate_cache()  # it would remember all folders
        for each in sorted(listed, key=lambda each: str(each["name"])):
            if each["type"] == "file":
                size = each["size"] if each.get("size") is not None else system.info(each["name"])["size"]
                yield each["name"].rpartition("/")[2], int(size)

    def content(self, name: str, size: int) -> bytes:
        facts = {"size": size, "ETag": self.stamp}
        return RemoteFile(self._system, f"{self._path}/{name}", facts, self._cache).read(0, size)


def walk(path: str, cache: Cache) -> Iterator[tuple[Folder, tuple[str, ...]]]:
    """Yield the folder ``path`` and all below it, each with the names that lead to it, in their order.

    Hidden folders, whose names begin with a dot, are left out.

    Raises:
        ConfigError: there is no such folder, or no access to it.
    """
    try:
        yield from _remote(path, cache) if is_url(path) else _local(local_path(path))
    except WorldsizeError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise unopened(path, reason_of(error)) from None


def _local(root: Path) -> Iterator[tuple[Folder, tuple[str, ...]]]:
    seen = set()
    if not root.is_dir():
        raise unopened(str(root), "there is no such folder")
    for name, folders, _ in os.walk(root, followlinks=True):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        path = Path(name)
        if (real := path.resolve()) in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(real)
        yield LocalFolder(path), path.relative_to(root).parts


def _remote(url: str, cache: Cache) -> Iterator[tuple[Folder, tuple[str, ...]]]:
    opened, root = open_system(url)
    system = opened.here()

    def below(path: str, parts: tuple[str, ...]) -> Iterator[tuple[Folder, tuple[str, ...]]]:
        listed = system.ls(path, detail=True)
        system.invalidate_cache()
        yield RemoteFolder(opened, path, [each for each in listed if each["type"] == "file"], cache), parts
        folders = {each["name"].rstrip("/").rpartition("/")[2]: each["name"] for each in listed if is_below(each, path)}
        for name in sorted(folders):
            if not name.startswith("."):
                yield from below(folders[name], (*parts, name))

    def is_below(each: Mapping[str, Any], path: str) -> bool:
        return bool(each["type"] == "directory" and each["name"].rstrip("/") != path.rstrip("/"))

    yield from below(root, ())
