"""Random access to bytes of files, by path or URL.

:class:`ByteReader` adapts a file for libraries that expect Python file objects. ``COUNTS`` contains read statistics of
this process, including its data workers.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, final

from worldsize.errors import WorldsizeError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


_WHOLE = 4 << 20  # bytes; the digest of a larger file covers only its size and samples of its content
_PARTS, _PART = 16, 16 << 10  # number of these samples, and bytes of each
_SECRETS = re.compile(r"://[^/@\s]*@|\?\S*")
_OPEN = 128  # maximum number of open files per process
_THREADS = 16  # must be less than _OPEN


class SampleError(WorldsizeError):
    """A sample cannot be read; the message gives the file and the byte offset."""


class ByteFile(ABC):
    """Base class of files with random access to bytes.

    Attributes:
        name: The path or URL for messages, without potential secrets.
        size: Size in bytes.
        stamp: Version of the content: the modification time, or a version reported by the store.
    """

    name: str
    size: int
    stamp: str

    @property
    def identity(self) -> str:
        """Unique name of the file, without secrets."""
        return self.name

    @abstractmethod
    def _read_bytes(self, start: int, stop: int) -> bytes: ...

    def _read_once(self, start: int, stop: int) -> bytes:
        """Read bytes like :meth:`_read_bytes`, but without fetching the bytes around them."""
        return self._read_bytes(start, stop)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` to ``stop`` (exclusive).

        Raises:
            SampleError: the file ends before ``stop``, or cannot be read.
        """
        return self._read_exactly(self._read_bytes, start, stop)

    def _read_exactly(self, read: Callable[[int, int], bytes], start: int, stop: int) -> bytes:
        try:
            data = read(start, stop)
        except (OSError, ValueError) as error:
            reason = format_reason(error).rstrip(".")
            raise SampleError(f"{self.name}, byte {start}: read failed: {reason}.") from None
        if len(data) != stop - start:
            raise SampleError(
                f"{self.name}, byte {start + len(data)}: unexpected end of file, expected {stop - start} bytes from "
                f"byte {start}. Copy the file again."
            )
        COUNTS.read += len(data)
        return data

    def compute_digest(self) -> str:
        """Return a SHA-256 of size and content; above 4 MiB, of 16 evenly spaced parts."""
        hashed = hashlib.sha256(str(self.size).encode())
        if self.size <= _WHOLE:
            hashed.update(self.read(0, self.size))
        else:
            for part in range(_PARTS):
                start = part * (self.size - _PART) // (_PARTS - 1)
                hashed.update(self._read_exactly(self._read_once, start, start + _PART))
        return hashed.hexdigest()


@final
class LocalFile(ByteFile):
    """A local file.

    Raises:
        OSError: the file does not exist, or is not a regular file (for example a pipe).
    """

    def __init__(self, path: Path) -> None:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # a pipe cannot seek
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        self.path, self.name = path, str(path)
        self.size, self.stamp = facts.st_size, str(facts.st_mtime_ns)
        self._inode = facts.st_dev, facts.st_ino

    def open_descriptor(self) -> Opened:
        """Open the file, and check that it is unchanged since this object was created.

        A truncated file is accepted here, since reads beyond its end raise an error with the offset.

        Raises:
            OSError: the file has been replaced or written to.
        """
        opened = Opened(self.path)
        facts = os.fstat(opened.descriptor)
        if (facts.st_dev, facts.st_ino) != self._inode:
            raise OSError(errno.ESTALE, "the file was replaced after the run started. Restart the run")
        if str(facts.st_mtime_ns) != self.stamp and facts.st_size >= self.size:
            raise OSError(errno.ESTALE, "the file was modified after the run started. Restart the run")
        return opened

    def _read_bytes(self, start: int, stop: int) -> bytes:
        opened, parts = _open_cached(self), []  # stays open while referenced
        while start < stop and (part := os.pread(opened.descriptor, stop - start, start)):
            parts.append(part)  # one call reads at most 2 GiB
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@final
class Opened:
    """A read-only file descriptor that is closed on deletion."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@lru_cache(_OPEN)
def _open_cached(file: LocalFile) -> Opened:
    return file.open_descriptor()


def compute_digests(files: Sequence[ByteFile]) -> list[str]:
    """Compute the digest of each file in parallel threads; hashing and reading release the GIL."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(ByteFile.compute_digest, files))


def strip_secrets(url: str) -> str:
    """Return ``url`` without user name, password and query, which may be secret."""
    return _SECRETS.sub(lambda match: "://" if match[0].startswith(":") else "", url)


def format_reason(error: Exception) -> str:
    """Return the reason of a failed open or read, without potential secrets."""
    return getattr(error, "strerror", None) or strip_secrets(str(error)) or type(error).__name__


@final
class ByteReader(io.RawIOBase):
    """A Python file object over a :class:`ByteFile`, with its own position.

    Read errors raise :class:`SampleError`. The end of the file is determined when the :class:`ByteFile` is created.
    """

    def __init__(self, file: ByteFile) -> None:
        super().__init__()
        self._file = file
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        stop = self._file.size if size is None or size < 0 else min(self._position + size, self._file.size)
        data = self._file.read(self._position, stop) if stop > self._position else b""
        self._position += len(data)
        return data

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)


@final
@dataclass
class ReadCounts:
    """Read statistics.

    Attributes:
        read: bytes of requested samples and indices.
        fetched: bytes received from other machines.
        skipped: number of unreadable samples that were skipped (``on_error=skip``).
    """

    read: int = 0
    fetched: int = 0
    skipped: int = 0

    def add(self, read: int, fetched: int, skipped: int) -> None:
        """Add the counts of another process."""
        self.read += read
        self.fetched += fetched
        self.skipped += skipped

    def reset(self) -> None:
        """Reset all counts, for example in a forked process, which inherits its parent's counts."""
        self.read = self.fetched = self.skipped = 0

    def subtract_counts(self, before: ReadCounts) -> ReadCounts:
        """Return the difference from the earlier counts ``before``."""
        return ReadCounts(self.read - before.read, self.fetched - before.fetched, self.skipped - before.skipped)

    def copy(self) -> ReadCounts:
        """Return a copy of the current counts."""
        return ReadCounts(self.read, self.fetched, self.skipped)

    def pop_counts(self) -> tuple[int, int, int]:
        """Return the counts as arguments for :meth:`add`, and reset them."""
        counts = self.read, self.fetched, self.skipped
        self.reset()
        return counts


COUNTS = ReadCounts()
"""Counts of this process and its data workers since the process started."""
