"""Files of other machines, read by blocks that a cache keeps on this one."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from functools import cached_property, lru_cache, partial
from typing import Any, final

from worldsize.data.storage.byte_files import ByteFile, without_secrets
from worldsize.data.storage.cache import BlockCache, Cache
from worldsize.data.storage.read_counts import COUNTS
from worldsize.errors import ConfigError

_logger = logging.getLogger(__name__)
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
