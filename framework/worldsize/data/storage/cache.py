"""Files of other machines, read in blocks, and the folder of bounded size that caches them on this machine.

The folder also holds the indices of data sets.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, final

from filelock import FileLock

from worldsize.core import FilePath, Range
from worldsize.data.storage.byte_files import COUNTS, ByteFile, without_secrets
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.world.scratch import cache_folder

_logger = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM = 0.9  # share of the capacity that is left when the oldest blocks have been removed
_RECENT = 1.0  # seconds in which a block is not marked again as used
_LOOKS = 32  # the folder is looked through each time that 1/32 of the capacity has been added


@final
@dataclass(frozen=True)
class Cache:
    """A folder for indices and parts of remote files, which all processes of a host share.

    Args:
        folder: None: ``worldsize`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``.
        capacity: bytes that parts of remote files take at most, and as many again that indices do; what is unused for
            longest goes first, but no index that a process uses.
        block: bytes that are fetched at once.
    """

    folder: Annotated[str | None, FilePath()] = None
    capacity: Annotated[float, Range(least=0, hint="it is in bytes")] = 20e9
    block: Annotated[int, Range(least=4096, most=1 << 30, hint="it is in bytes")] = 4 << 20

    @property
    def root(self) -> Path:
        """The folder, which may not exist yet."""
        return cache_folder() if self.folder is None else Path(self.folder).expanduser()

    def made(self, name: str) -> Path:
        """Make the folder ``name`` of the cache, unless it is there.

        Raises:
            WorldsizeError: it cannot be made.
        """
        folder = self.root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WorldsizeError(
                f"the cache folder {folder} cannot be made: {error.strerror}. Set cache.folder of the data to another."
            ) from None
        return folder


@final
class BlockCache:
    """Keeps blocks of remote files on disk, and removes those unused for longest.

    A block that has no room is handed on without being kept. Processes that add blocks at the same time may exceed the
    capacity by 1/32 each until one of them removes the oldest.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._folder = cache.made("blocks")
        self._added = float("inf")  # bytes since the folder was looked through; the first block looks
        self._told = False

    def read(self, file: str, number: int, span: tuple[int, int], fetch: Callable[[], bytes]) -> bytes:
        """Return bytes ``span`` (from, to) of block ``number`` of ``file``, which ``fetch`` gets if it is not here.

        Args:
            file: a name that changes whenever the content does.
        """
        path = self._path(file, number)
        data = _kept(path, span)
        if len(data) == span[1] - span[0]:
            return data
        block = fetch()
        self._keep(path, block)
        return block[span[0] : span[1]]

    def kept(self, file: str, number: int, span: tuple[int, int]) -> bytes:
        """Return bytes ``span`` (from, to) of a block if they are here, or fewer."""
        return _kept(self._path(file, number), span)

    def _path(self, file: str, number: int) -> Path:
        return self._folder / file[:2] / file / str(number)

    def _keep(self, path: Path, block: bytes) -> None:
        if len(block) > self._cache.capacity * _ROOM:
            return self._tell(
                f"a block of {len(block):,} bytes is larger than the capacity {self._cache.capacity:,.0f}"
            )
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            if self._added + len(block) > self._cache.capacity / _LOOKS:
                self._make_room(len(block))
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(block)
            temporary.rename(path)
            self._added += len(block)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            if error.errno not in _FULL:
                raise WorldsizeError(f"the cache {self._folder} takes nothing: {error.strerror}.") from None
            self._added = float("inf")
            self._tell(f"the disk of {self._folder} is full")

    def _make_room(self, size: int) -> None:
        """Remove the blocks unused for longest until there is room for ``size`` bytes and those to come."""
        with FileLock(self._cache.root / "blocks.lock"):
            entries = []
            for block in self._folder.rglob("[!.]*"):  # others are still being written
                with suppress(OSError):
                    facts = block.stat()
                    entries += [(facts.st_mtime_ns, facts.st_size, block)] if block.is_file() else []
            used = sum(entry[1] for entry in entries)
            if used + size > self._cache.capacity * (1 - 1 / _LOOKS):
                for _, length, block in sorted(entries):
                    if used + size <= self._cache.capacity * _ROOM:
                        break
                    with suppress(OSError):
                        block.unlink()
                    used -= length
        self._added = 0

    def _tell(self, reason: str) -> None:
        if not self._told:
            _logger.warning("%s: what is read of remote files is not kept. Make room, or set cache.folder.", reason)
        self._told = True


def _kept(path: Path, span: tuple[int, int]) -> bytes:
    """Return the bytes ``span`` of a block, or fewer if they are not here; mark the block as used just now."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        if time.time() - os.fstat(descriptor).st_mtime > _RECENT:
            with suppress(OSError):
                os.utime(descriptor)
        return os.pread(descriptor, span[1] - span[0], span[0])
    finally:
        os.close(descriptor)


_WAITS = (0.5, 2.0)  # seconds before a block is asked for again
_VERSIONS = (  # what file systems call that by which they tell one content from another, the surest first
    *("ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "Digest", "checksum", "blob_id", "generation"),
    *("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "modified", "created"),
)


def version(facts: Mapping[str, Any]) -> str:
    """Return what a file system says of a file that changes when its content does; "": nothing."""
    return next((str(facts[key]) for key in _VERSIONS if facts.get(key)), "")


@final
class RemoteSystem:
    """A file system of fsspec, which is made anew in a process that was forked.

    Connections, and the thread that serves them, stay behind in a fork.
    """

    def __init__(self, system: Any) -> None:
        self._system, self._process = system, os.getpid()

    def here(self) -> Any:
        """Return the file system for this process."""
        if self._process != os.getpid():
            self._system = type(self._system)(*self._system.storage_args, **self._system.storage_options)
            self._process = os.getpid()
        return self._system


@final
class RemoteFile(ByteFile):
    """A file of another machine, read by blocks that :class:`Cache` keeps on this one.

    Args:
        system: the file system that it is in.
        path: as ``system`` names it.
        facts: what ``system.info`` says of it.
        cache: keeps the blocks.
    """

    def __init__(self, system: RemoteSystem, path: str, facts: Mapping[str, Any], cache: Cache) -> None:
        self._system, self._path, self._cache = system, path, cache
        url = system.here().unstrip_protocol(path)
        self.name, self._url_digest = without_secrets(url), hashlib.sha256(url.encode()).hexdigest()
        if facts.get("size") is None:
            raise ConfigError(f"{self.name} does not say how large it is. Copy it to this machine first.")
        self.size = int(facts["size"])
        self.stamp = version(facts)

    @property
    def identity(self) -> str:
        """The URL without secrets, and a digest of all of it: a query may name the file."""
        return f"{self.name} {self._url_digest}"

    @cached_property
    def _key(self) -> str:
        return hashlib.sha256(f"{self.identity} {self.size} {self.stamp}".encode()).hexdigest()

    def _read(self, start: int, stop: int) -> bytes:
        size, parts = self._cache.block, []
        for number in range(start // size, -(-stop // size)):
            first, end = number * size, min((number + 1) * size, self.size)
            span = max(start, first) - first, min(stop, end) - first
            parts.append(_blocks(self._cache).read(self._key, number, span, partial(self._fetch, first, end)))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_once(self, start: int, stop: int) -> bytes:
        """Read bytes that are kept already, or get them alone, without the block around them."""
        number, first = divmod(start, self._cache.block)
        kept = _blocks(self._cache).kept(self._key, number, (first, first + stop - start))
        return kept if len(kept) == stop - start else self._fetch(start, stop)

    def _fetch(self, start: int, stop: int) -> bytes:
        """Get bytes from the other machine, which may need more than one try.

        Raises:
            OSError: it does not send them.
        """
        for seconds in (*_WAITS, None):
            try:
                data: bytes = self._system.here().cat_file(self._path, start=start, end=stop)
                break
            except FileNotFoundError:
                raise OSError("the file is gone") from None
            except Exception as error:  # each file system has errors of its own
                reason = without_secrets(str(error)) or type(error).__name__
                if seconds is None:
                    raise OSError(reason) from None
                _logger.warning("%s, byte %d: %s; it is tried again in %s s", self.name, start, reason, seconds)
                time.sleep(seconds)
        COUNTS.fetched += len(data)
        if len(data) > stop - start:
            raise OSError("the server sends the whole file when it is asked for a part. Copy it to this machine first")
        if len(data) < stop - start:
            raise OSError(f"{len(data)} bytes came of {stop - start}: it has become shorter, or the connection broke")
        return data


@lru_cache(8)
def _blocks(cache: Cache) -> BlockCache:
    return BlockCache(cache)
