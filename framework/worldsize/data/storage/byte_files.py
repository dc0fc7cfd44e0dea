"""Files by path or URL, of which each process reads only the bytes that it needs.

:class:`ByteReader` gives one to libraries that read Python's own file objects. ``COUNTS`` counts the reads of this
process, and those of its data workers for it.
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


_WHOLE = 4 << 20  # bytes: a larger file is known by its size and by parts of it
_PARTS, _PART = 16, 16 << 10
_SECRETS = re.compile(r"://[^/@\s]*@|\?\S*")
_OPEN = 128  # files that a process keeps open
_THREADS = 16  # fewer than files are kept open


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

    @property
    def identity(self) -> str:
        """A name that no other file has; it shows no secret."""
        return self.name

    @abstractmethod
    def _read(self, start: int, stop: int) -> bytes: ...

    def _read_once(self, start: int, stop: int) -> bytes:
        """Read bytes near which nothing else is read."""
        return self._read(start, stop)

    def read(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` up to ``stop``.

        Raises:
            SampleError: the file ends before, or cannot be read.
        """
        return self._checked(self._read, start, stop)

    def _checked(self, read: Callable[[int, int], bytes], start: int, stop: int) -> bytes:
        try:
            data = read(start, stop)
        except (OSError, ValueError) as error:
            reason = reason_of(error).rstrip(".")
            raise SampleError(f"{self.name}, byte {start}: it cannot be read: {reason}.") from None
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
                hashed.update(self._checked(self._read_once, start, start + _PART))
        return hashed.hexdigest()


@final
class LocalFile(ByteFile):
    """A file of this machine's file system.

    Raises:
        OSError: there is no such file, or it is something else, such as a pipe.
    """

    def __init__(self, path: Path) -> None:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # a pipe has no bytes to go back to
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        self.path, self.name = path, str(path)
        self.size, self.stamp = facts.st_size, str(facts.st_mtime_ns)
        self._inode = facts.st_dev, facts.st_ino

    def opened(self) -> Opened:
        """Open the file that was described when this was made.

        A shorter one is opened as well, as whoever reads beyond its end says where that is.

        Raises:
            OSError: another one has taken its place, or it has been written to.
        """
        opened = Opened(self.path)
        facts = os.fstat(opened.descriptor)
        if (facts.st_dev, facts.st_ino) != self._inode:
            raise OSError(errno.ESTALE, "another file has taken its place since the run listed its data. Start again")
        if str(facts.st_mtime_ns) != self.stamp and facts.st_size >= self.size:
            raise OSError(errno.ESTALE, "it was written to since the run listed its data. Start again")
        return opened

    def _read(self, start: int, stop: int) -> bytes:
        opened, parts = _opened(self), []  # it stays open while it is held
        while start < stop and (part := os.pread(opened.descriptor, stop - start, start)):
            parts.append(part)  # more than one, as a call reads at most 2 GiB
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@final
class Opened:
    """A descriptor that closes when nobody uses it any more."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


@lru_cache(_OPEN)
def _opened(file: LocalFile) -> Opened:
    return file.opened()


def digests(files: Sequence[ByteFile]) -> list[str]:
    """Return the digest of each file; several are read at once, as hashing and waiting leave other threads alone."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(ByteFile.digest, files))


def without_secrets(url: str) -> str:
    """Return ``url`` without a user's name, a password or a query, any of which may be secret."""
    return _SECRETS.sub(lambda match: "://" if match[0].startswith(":") else "", url)


def reason_of(error: Exception) -> str:
    """Return why a file cannot be opened or read, without what may be secret."""
    return getattr(error, "strerror", None) or without_secrets(str(error)) or type(error).__name__


@final
class ByteReader(io.RawIOBase):
    """Reads a :class:`ByteFile`, from a position of its own.

    What cannot be read is a :class:`SampleError`; beyond the size that the file had when it was opened, nothing is.
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
    """Counts of what was read.

    Attributes:
        read: bytes of samples and indices that were asked for.
        fetched: bytes that came from other machines.
        skipped: samples that could not be read, where ``on_error=skip``.
    """

    read: int = 0
    fetched: int = 0
    skipped: int = 0

    def add(self, read: int, fetched: int, skipped: int) -> None:
        """Add what another process has counted."""
        self.read += read
        self.fetched += fetched
        self.skipped += skipped

    def reset(self) -> None:
        """Begin anew at zero, as a process does that has inherited the counts of another."""
        self.read = self.fetched = self.skipped = 0

    def since(self, before: ReadCounts) -> ReadCounts:
        """Return the counts from ``before`` until now."""
        return ReadCounts(self.read - before.read, self.fetched - before.fetched, self.skipped - before.skipped)

    def copy(self) -> ReadCounts:
        """Return the counts as they are now."""
        return ReadCounts(self.read, self.fetched, self.skipped)

    def taken(self) -> tuple[int, int, int]:
        """Return the three counts, for :meth:`add`, and begin anew at zero."""
        counts = self.read, self.fetched, self.skipped
        self.reset()
        return counts


COUNTS = ReadCounts()
"""Counts of this process and its data workers since it began."""
