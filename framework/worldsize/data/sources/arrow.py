"""Samples that are rows of Arrow files, which are mapped into memory where they are on this machine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, final

from worldsize.data.sources.table_parts import Table, arrow
from worldsize.data.sources.tables import PlacedPart, TableSource, check_columns
from worldsize.data.storage.byte_files import ByteFile, LocalFile, Opened, SampleError
from worldsize.data.storage.read_counts import COUNTS
from worldsize.data.storage.reader import ByteReader

_OPEN = 64  # files that a process keeps open
_FOOTED = b"ARROW1"  # begins a file with a footer, whose messages are as in a stream and begin at byte 8
_FIRST = 8


@dataclass(frozen=True)
class ArrowSource(TableSource):
    """Rows of Arrow's record batches, in its format of files (Feather) or of streams.

    Files of this machine are mapped into memory, so that a sample costs the pages that it lies on.
    """

    def parts(self, file: ByteFile) -> Iterator[PlacedPart]:
        messages = _opened(file)
        check_columns(self, messages.schema.names, f"{file.name}, byte 0")
        for number, (start, rows) in enumerate(messages.starts()):
            yield PlacedPart(start, number, rows)

    def read_part(self, file: ByteFile, start: int, number: int) -> tuple[Table, float]:
        batch = _opened(file).read(start)
        if self.columns is not None:
            batch = batch.select(list(self.columns))
        return batch, _opened(file).memory(batch)

    def touch(self, file: ByteFile, size: int) -> None:
        if isinstance(file, LocalFile):
            _opened(file).check_size()
            COUNTS.read += size  # as pages of a mapped file, which nothing else sees


@final
@dataclass(frozen=True)
class Arrow(ArrowSource):
    """Rows of Arrow files: Feather, Arrow IPC files and streams."""

    endings: ClassVar[Sequence[str]] = (".arrow", ".feather", ".ipc")


@final
class _Messages:
    """The record batches of an open file, each found by the byte where it begins."""

    def __init__(self, file: ByteFile) -> None:
        if file.size == 0:
            raise SampleError(f"{file.name}, byte 0: the file is empty. Bring the whole file.")
        self._file = file
        self._opened: Opened | None = None
        self._mapped: Any = None
        if isinstance(file, LocalFile):
            self._opened, self._mapped = _mapped(file)
        self._first = _FIRST if file.read(0, min(len(_FOOTED), file.size)) == _FOOTED else 0
        schema, self._begin = self._message(self._first)
        try:
            self.schema = arrow().ipc.read_schema(schema)
        except (arrow().ArrowException, OSError) as error:
            raise SampleError(f"{file.name}, byte {self._first}: it is no Arrow file: {error}.") from None
        if any(arrow().types.is_dictionary(field.type) for field in self.schema):
            raise SampleError(
                f"{file.name}, byte {self._first}: it has columns of categories (dictionary-encoded), which cannot be "
                "read from any place. Write them as plain columns."
            )

    def check_size(self) -> None:
        """Raise SampleError if a mapped file is shorter than it was: to touch what it lost ends the process."""
        if self._opened is not None:
            _check_size(self._opened, self._file)

    def starts(self) -> Iterator[tuple[int, int]]:
        """Yield for each record batch the byte where it begins, and its rows."""
        start = self._begin
        while start < self._file.size:
            message, stop = self._message(start)
            if message is None:
                return
            yield start, self._batch(message, start).num_rows
            start = stop
        raise SampleError(f"{self._file.name}, byte {start}: the file ends without an end mark. Bring the whole file.")

    def read(self, start: int) -> Table:
        """Read the record batch at a byte."""
        return self._batch(self._message(start)[0], start)

    def memory(self, batch: Table) -> int:
        """Return the bytes of ``batch`` that are not mapped from the file."""
        buffers = [each for column in batch.columns for each in column.buffers() if each is not None]
        if self._mapped is None:
            return sum(each.size for each in buffers)
        first, last = self._mapped.address, self._mapped.address + self._mapped.size
        return sum(each.size for each in buffers if not first <= each.address < last)

    def _batch(self, message: Any, start: int) -> Table:
        try:
            return arrow().ipc.read_record_batch(message, self.schema)
        except (arrow().ArrowException, OSError, TypeError) as error:
            raise SampleError(f"{self._file.name}, byte {start}: the rows here do not decode: {error}.") from None

    def _message(self, start: int) -> tuple[Any, int]:
        """Return the message at a byte, and where it stops; None: the file's messages end there."""
        self.check_size()
        if self._mapped is None:
            source = arrow().PythonFile(ByteReader(self._file), mode="r")
            source.seek(start)
        else:
            source = arrow().BufferReader(self._mapped.slice(start))
        try:
            message = arrow().ipc.read_message(source)
        except EOFError:
            return None, start
        except (arrow().ArrowException, OSError) as error:
            raise SampleError(f"{self._file.name}, byte {start}: no Arrow data are here: {error}.") from None
        return message, source.tell() + (0 if self._mapped is None else start)


def _mapped(file: LocalFile) -> tuple[Opened, Any]:
    """Open a file and map it into memory."""
    try:
        opened = file.opened()
        _check_size(opened, file)
        return opened, arrow().py_buffer(mmap.mmap(opened.descriptor, file.size, prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SampleError(f"{file.name}, byte 0: it cannot be mapped into memory: {reason}.") from None


def _check_size(opened: Opened, file: ByteFile) -> None:
    if (size := os.fstat(opened.descriptor).st_size) < file.size:
        raise SampleError(
            f"{file.name}, byte {size}: the file ends here, and had {file.size:,} bytes before. Bring the whole file."
        )


@lru_cache(_OPEN)
def _opened(file: ByteFile) -> _Messages:
    return _Messages(file)
