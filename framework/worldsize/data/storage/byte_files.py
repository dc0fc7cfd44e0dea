"""Files by path or URL, of which each process reads only the bytes that it needs."""

from __future__ import annotations

import hashlib
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, final

from worldsize.data.storage.cache import BlockCache, Cache
from worldsize.data.storage.read_counts import COUNTS
from worldsize.errors import ConfigError, WorldsizeError

_WHOLE = 4 << 20  # bytes: a larger file is known by its size and by parts of it
_PARTS, _PART = 16, 16 << 10
_SECRETS = re.compile(r"://[^/@\s]*@|\?\S*")
_OPEN = 128  # files that a process keeps open
_VERSIONS = ("ETag", "etag", "md5Hash", "content_md5", "checksum", "mtime", "LastModified", "last_modified", "created")


class SampleError(WorldsizeError):
    """A sample that cannot be read; its message names the file and the place."""


class ByteFile(ABC):
    """A file whose bytes are read in parts.

    Attributes:
        name: The path or URL as messages show it, without what may be secret.
        size: Bytes.
        stamp: It changes when the content does: the time of the last change, or what a store calls the version.
    """

    name: str
    size: int
    stamp: str

    @abstractmethod
    def _read(self, start: int, stop: int) -> bytes: ...

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` up to ``stop``.

        Raises:
            SampleError: the file ends before, or cannot be read.
        """
        try:
            data = self._read(start, stop)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise SampleError(f"{self.name}, byte {start}: it cannot be read: {reason}.") from error
        if len(data) != stop - start:
            raise SampleError(
                f"{self.name}, byte {start + len(data)}: the file ends here, and {stop - start} bytes from {start} on "
                "were expected. Bring the whole file."
            )
        COUNTS.read += len(data)
        return data

    def digest(self) -> str:
        """Return a SHA-256 of the content; of a file larger than 4 MiB, of its size and 16 parts spread over it."""
        hashed = hashlib.sha256(str(self.size).encode())
        if self.size <= _WHOLE:
            hashed.update(self.read(0, self.size))
        else:
            for part in range(_PARTS):
                start = part * (self.size - _PART) // (_PARTS - 1)
                hashed.update(self.read(start, start + _PART))
        return hashed.hexdigest()


@final
class LocalFile(ByteFile):
    """A file of this machine's file system.

    Raises:
        OSError: there is no such file.
    """

    def __init__(self, path: Path) -> None:
        facts = path.stat()
        self.path, self.name = path, str(path)
        self.size, self.stamp = facts.st_size, str(facts.st_mtime_ns)

    def _read(self, start: int, stop: int) -> bytes:
        descriptor, parts = _opened(self.path).descriptor, []
        while start < stop and (part := os.pread(descriptor, stop - start, start)):
            parts.append(part)  # more than one, as a call reads at most 2 GiB
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@final
class _Opened:
    """A descriptor that closes when nobody uses it any more."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@lru_cache(_OPEN)
def _opened(path: Path) -> _Opened:
    return _Opened(path)


@final
class RemoteFile(ByteFile):
    """A file of another machine, read by blocks that :class:`Cache` keeps on this one.

    Args:
        system: a file system of fsspec.
        path: as ``system`` names it.
        facts: what ``system.info`` says of it.
        cache: keeps the blocks.
    """

    def __init__(self, system: Any, path: str, facts: Mapping[str, Any], cache: Cache) -> None:
        self._system, self._path, self._cache = system, path, cache
        self.name = without_secrets(system.unstrip_protocol(path))
        if facts.get("size") is None:
            raise ConfigError(f"{self.name} does not say how large it is. Copy it to this machine first.")
        self.size = int(facts["size"])
        self.stamp = next((str(facts[key]) for key in _VERSIONS if facts.get(key)), "")

    @cached_property
    def _key(self) -> str:
        return hashlib.sha256(f"{self.name} {self.size} {self.stamp}".encode()).hexdigest()

    def _read(self, start: int, stop: int) -> bytes:
        size, parts = self._cache.block, []
        for number in range(start // size, -(-stop // size)):
            first, end = number * size, min((number + 1) * size, self.size)
            span = max(start, first) - first, min(stop, end) - first
            parts.append(_blocks(self._cache).read(self._key, number, span, partial(self._fetch, first, end)))
        return b"".join(parts)

    def _fetch(self, start: int, stop: int) -> bytes:
        data: bytes = self._system.cat_file(self._path, start=start, end=stop)
        COUNTS.fetched += len(data)
        return data


@lru_cache(8)
def _blocks(cache: Cache) -> BlockCache:
    return BlockCache(cache)


def open_files(paths: str | Sequence[str], cache: Cache, *, endings: Sequence[str] = ("",)) -> list[ByteFile]:
    """Return the files that ``paths`` name, those of a folder or a pattern in the order of their names.

    Args:
        paths: one or several files, folders, or patterns such as ``books-*.jsonl``: paths of this machine, or URLs of
            any file system that fsspec knows.
        cache: keeps what is read of URLs.
        endings: of the names that count in a folder, such as ``.jsonl``.

    Raises:
        ConfigError: there is no such file, or no access to it.
    """
    named = [paths] if isinstance(paths, str) else paths
    return [file for path in named for file in _files_of(path, cache, tuple(endings))]


def _files_of(path: str, cache: Cache, endings: tuple[str, ...]) -> Sequence[ByteFile]:
    is_url = "://" in path and not path.startswith("file://")
    files = _remote(path, cache, endings) if is_url else _local(path.removeprefix("file://"), endings)
    if not files:
        inside = "" if endings == ("",) else f", or no file in it that ends with {' or '.join(endings)}"
        raise ConfigError(f"{without_secrets(path)}: there is no such file{inside}. Check the path of the data.")
    return files


def _local(path: str, endings: tuple[str, ...]) -> Sequence[ByteFile]:
    local = Path(path).expanduser().absolute()
    if local.is_file():
        return [LocalFile(local)]
    if local.is_dir():
        inside = (Path(folder, name) for folder, _, names in os.walk(local) for name in names)
        return [LocalFile(name) for name in sorted(inside) if name.name.endswith(endings)]
    anchor = Path(local.anchor)
    return [LocalFile(name) for name in sorted(anchor.glob(str(local.relative_to(anchor)))) if name.is_file()]


def _remote(url: str, cache: Cache, endings: tuple[str, ...]) -> Sequence[ByteFile]:
    import fsspec  # it takes a tenth of a second, and only URLs need it

    try:
        system, path = fsspec.core.url_to_fs(url)
        if "*" in path:
            facts = system.glob(path, detail=True)
        elif system.isdir(path):
            inside = system.find(path, detail=True)
            facts = {name: fact for name, fact in inside.items() if name.endswith(endings)}
        else:
            facts = {path: system.info(path)}
    except (OSError, ValueError, ImportError) as error:
        reason = without_secrets(str(error)) or type(error).__name__
        raise ConfigError(
            f"{without_secrets(url)}: it cannot be opened: {reason.rstrip('.')}. Check the path of the data."
        ) from None
    return [RemoteFile(system, name, facts[name], cache) for name in sorted(facts)]


def without_secrets(url: str) -> str:
    """Return ``url`` without a user's name, a password or a query, any of which may be secret."""
    return _SECRETS.sub(lambda match: "://" if match[0].startswith(":") else "", url)
