"""A file of bytes as Python's own file objects are, for libraries that read those."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, final

from worldsize.data.storage.byte_files import ByteFile

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


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
