"""Remote files that are read in blocks, and a local cache folder of bounded size.

The cache folder also stores the indices of data sets.
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
from worldsize.data.storage.byte_files import COUNTS, ByteFile, strip_secrets
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.world.scratch import cache_folder

_logger = logging.getLogger(__name__)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ROOM = 0.9  # share of the capacity to use after removing old blocks
_RECENT = 1.0  # minimum seconds between two updates of a block's access time
_LOOKS = 32  # scan the folder after adding 1/32 of the capacity


@final
@dataclass(frozen=True)
class Cache:
    """Cache folder for indices and blocks of remote files, shared by all processes on a host.

    Args:
        folder: the folder; None uses ``worldsize`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``.
        capacity: limit in bytes for blocks of remote files, and separately for indices. The least recently used ones
            are removed first, except indices in use.
        block: bytes to fetch per request.
    """

    folder: Annotated[str | None, FilePath()] = None
    capacity: Annotated[float, Range(least=0, hint="the unit is bytes")] = 20e9
    block: Annotated[int, Range(least=4096, most=1 << 30, hint="the unit is bytes")] = 4 << 20

    @property
    def root(self) -> Path:
        """Path of the cache folder, which may not exist yet."""
        return cache_folder() if self.folder is None else Path(self.folder).expanduser()

    def create_folder(self, name: str) -> Path:
        """Create the subfolder ``name`` if needed, and return its path.

        Raises:
            WorldsizeError: the folder cannot be created.
        """
        folder = self.root / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise WorldsizeError(
                f"failed to create the cache folder {folder}: {error.strerror}. Set cache.folder to a different folder."
            ) from None
        return folder


@final
class BlockCache:
    """On-disk cache of blocks of remote files that evicts the least recently used ones.

    Blocks that do not fit are returned without being stored. Processes that add blocks concurrently may each exceed the
    capacity by 1/32 until one of them evicts blocks.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._folder = cache.create_folder("blocks")
        self._added = float("inf")  # bytes added since the last scan; the first block triggers a scan
        self._told = False

    def read(self, file: str, number: int, span: tuple[int, int], fetch: Callable[[], bytes]) -> bytes:
        """Return bytes ``span`` (start, stop) of a block of ``file``; fetch it if not cached.

        Args:
            file: a key that changes with the file's content.
        """
        path = self._get_block_path(file, number)
        data = _read_cached_block(path, span)
        if len(data) == span[1] - span[0]:
            return data
        block = fetch()
        self._store_block(path, block)
        return block[span[0] : span[1]]

    def read_cached(self, file: str, number: int, span: tuple[int, int]) -> bytes:
        """Return bytes ``span`` (start, stop) of a block, or fewer if they are not cached."""
        return _read_cached_block(self._get_block_path(file, number), span)

    def _get_block_path(self, file: str, number: int) -> Path:
        return self._folder / file[:2] / file / str(number)

    def _store_block(self, path: Path, block: bytes) -> None:
        if len(block) > self._cache.capacity * _ROOM:
            return self._warn_once(
                f"a block of {len(block):,} bytes does not fit into the cache of {self._cache.capacity:,.0f} bytes. "
                "Increase cache.capacity."
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
                raise WorldsizeError(f"failed to write to the cache {self._folder}: {error.strerror}.") from None
            self._added = float("inf")
            self._warn_once(
                f"the disk of {self._folder} is full. Free disk space, or set cache.folder to a different disk."
            )

    def _make_room(self, size: int) -> None:
        """Evict the least recently used blocks to make room for ``size`` bytes and later blocks."""
        with FileLock(self._cache.root / "blocks.lock"):
            entries = []
            for block in self._folder.rglob("[!.]*"):  # hidden files are still being written
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

    def _warn_once(self, reason: str) -> None:
        if not self._told:
            _logger.warning("remote data are not cached: %s", reason)
        self._told = True


def _read_cached_block(path: Path, span: tuple[int, int]) -> bytes:
    """Read bytes of a cached block (fewer if missing), and update its access time."""
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


_WAITS = (0.5, 2.0)  # seconds before each retry
_VERSIONS = (  # keys of content versions in the metadata of file systems, most reliable first
    *("ETag", "etag", "md5Hash", "Content-MD5", "content_md5", "Digest", "checksum", "blob_id", "generation"),
    *("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "modified", "created"),
)


def extract_version(facts: Mapping[str, Any]) -> str:
    """Return a version of a file's content from its file-system metadata; "" if it has none."""
    return next((str(facts[key]) for key in _VERSIONS if facts.get(key)), "")


@final
class RemoteSystem:
    """An fsspec file system that is recreated in a forked process.

    Connections and the thread that serves them do not survive a fork.
    """

    def __init__(self, system: Any) -> None:
        self._system, self._process = system, os.getpid()

    def get_system(self) -> Any:
        """Return the file system of this process, creating it after a fork."""
        if self._process != os.getpid():
            self._system = type(self._system)(*self._system.storage_args, **self._system.storage_options)
            self._process = os.getpid()
        return self._system


@final
class RemoteFile(ByteFile):
    """A file on a remote machine, read in blocks that are cached locally.

    Args:
        system: the file system that contains the file.
        path: path within ``system``.
        facts: metadata of the file, from ``system.info``.
        cache: cache for the blocks.
    """

    def __init__(self, system: RemoteSystem, path: str, facts: Mapping[str, Any], cache: Cache) -> None:
        self._system, self._path, self._cache = system, path, cache
        url = system.get_system().unstrip_protocol(path)
        self.name, self._url_digest = strip_secrets(url), hashlib.sha256(url.encode()).hexdigest()
        if facts.get("size") is None:
            raise ConfigError(f"the size of {self.name} is unknown. Copy the file to this machine first.")
        self.size = int(facts["size"])
        self.stamp = extract_version(facts)

    @property
    def identity(self) -> str:
        """The URL without secrets, and a digest of the full URL, as a query may identify the file."""
        return f"{self.name} {self._url_digest}"

    @cached_property
    def _key(self) -> str:
        return hashlib.sha256(f"{self.identity} {self.size} {self.stamp}".encode()).hexdigest()

    def _read_bytes(self, start: int, stop: int) -> bytes:
        size, parts = self._cache.block, []
        for number in range(start // size, -(-stop // size)):
            first, end = number * size, min((number + 1) * size, self.size)
            span = max(start, first) - first, min(stop, end) - first
            parts.append(
                _get_block_cache(self._cache).read(self._key, number, span, partial(self._fetch_range, first, end))
            )
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _read_once(self, start: int, stop: int) -> bytes:
        """Read bytes from the cache, or fetch only these bytes instead of a full block."""
        number, first = divmod(start, self._cache.block)
        kept = _get_block_cache(self._cache).read_cached(self._key, number, (first, first + stop - start))
        return kept if len(kept) == stop - start else self._fetch_range(start, stop)

    def _fetch_range(self, start: int, stop: int) -> bytes:
        """Fetch bytes from the remote machine, with retries.

        Raises:
            OSError: all attempts failed, the file is gone, or the server sent the wrong number of bytes.
        """
        for seconds in (*_WAITS, None):
            try:
                data: bytes = self._system.get_system().cat_file(self._path, start=start, end=stop)
                break
            except FileNotFoundError:
                raise OSError("the file no longer exists") from None
            except Exception as error:  # each file system raises different errors
                reason = strip_secrets(str(error)) or type(error).__name__
                if seconds is None:
                    raise OSError(reason) from None
                _logger.warning("%s, byte %d: %s; retrying in %s s", self.name, start, reason, seconds)
                time.sleep(seconds)
        COUNTS.fetched += len(data)
        if len(data) > stop - start:
            raise OSError("the server does not support range requests. Copy the file to this machine first")
        if len(data) < stop - start:
            raise OSError(f"received {len(data)} of {stop - start} bytes (file truncated or connection lost)")
        return data


@lru_cache(8)
def _get_block_cache(cache: Cache) -> BlockCache:
    return BlockCache(cache)
