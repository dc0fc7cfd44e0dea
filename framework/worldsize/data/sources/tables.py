"""Samples that are rows of tables in parts, of which a process keeps those that it has read last."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, NamedTuple

import numpy

from worldsize.core import OneOf, Range
from worldsize.data.source import Array, IndexedSource
from worldsize.data.sources.table_parts import FEW, Table, TableReader, rows_of
from worldsize.data.storage.byte_files import ByteFile, SampleError
from worldsize.data.storage.index import Scan
from worldsize.errors import ConfigError, neighbours

_logger = logging.getLogger(__name__)


class PlacedPart(NamedTuple):
    """A part of a file: the byte where it begins, its place among the file's parts, and its rows."""

    start: int
    number: int
    rows: int


@dataclass(frozen=True)
class TableSource(IndexedSource):
    """Rows of tables, each a dict of its columns.

    Args:
        columns: those that are read; None: all.
        format: "python": numbers, strings, lists and dicts; "numpy": columns of numbers are NumPy's numbers, and those
            of lists of numbers its arrays, which become tensors in batches.
        keep: bytes of decoded parts that each process keeps; the part read last is kept in any case.
        length_column: a column of whole numbers that say how long each sample is, for ``length_balanced``. It is read
            once, for the index. A part that cannot be read and is skipped has the length 0.
    """

    columns: Sequence[str] | None = None
    format: Annotated[str, OneOf("python", "numpy")] = "python"
    keep: Annotated[float, Range(least=0, hint="it is in bytes")] = 256e6
    length_column: str | None = None

    @abstractmethod
    def parts(self, file: ByteFile) -> Iterator[PlacedPart]:
        """Yield the parts of a file.

        Raises:
            SampleError: the file is not of this kind.
            ConfigError: it lacks a column.
        """

    @abstractmethod
    def read_part(self, file: ByteFile, start: int, number: int) -> tuple[Table, float]:
        """Read a part of a file, and say how many bytes of memory it takes.

        Raises:
            SampleError: it cannot be read.
        """

    @property
    def kind(self) -> str:
        kind = f"{type(self).__name__}-1 columns={self.columns}"  # which are sought in each file that is indexed
        if self.length_column is None:
            return kind
        return f"{kind} length_column={self.length_column} on_error={self.on_error}"

    def scanner(self) -> Scan:
        rows = 0

        def scan(file: ByteFile) -> Iterator[Mapping[str, Array]]:
            nonlocal rows
            parts = [part for part in self.parts(file) if part.rows]
            stops = rows + numpy.cumsum([part.rows for part in parts], dtype=numpy.uint64)
            rows += sum(part.rows for part in parts)
            starts = numpy.array([part.start for part in parts], dtype=numpy.uint64)
            numbers = numpy.array([part.number for part in parts], numpy.uint32)
            yield {"stop": stops, "start": starts, "number": numbers, **_lengths_in(self, file, parts)}

        return scan

    def __len__(self) -> int:
        return int(self.index["stop"][-1])

    def sample(self, index: int) -> dict[str, Any]:
        parts, numbers = self._reader.places([index])
        return self.finished(self._rows(parts, numbers), parts)[0]

    def read_each(self, indices: Sequence[int]) -> list[Any]:
        """Read several samples, in their order; what lies in one part is taken from it at once."""
        if not indices or min(indices) < 0 or max(indices) >= len(self):
            return super().read_each(indices)
        parts, numbers = self._reader.places(indices)
        try:
            return self.finished(self._rows(parts, numbers), parts)
        except SampleError:  # of one of them: each is read by itself, as on_error says
            return super().read_each(indices)

    def _rows(self, parts: Sequence[int], numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return samples in their order, given the part in which each is and its row there."""
        counts, sizes = Counter(parts), Counter[int]()
        tables = {part: self._reader.part(part) for part in counts}
        for part, file in zip(counts, self.index["file"][[*counts]].tolist(), strict=True):
            sizes[file] += counts[part] * tables[part].row_bytes
        for file, size in sizes.items():
            self.touch(self.files[file], size)
        if self.format == "python" and len(parts) < FEW * len(counts):
            return [tables[part].row(number) for part, number in zip(parts, numbers, strict=True)]
        places: dict[int, list[int]] = {part: [] for part in counts}
        for place, part in enumerate(parts):
            places[part].append(place)
        pieces = [
            piece
            for part, table in tables.items()
            for piece in table.pieces([numbers[place] for place in places[part]])
        ]
        in_order: list[Any] = [None] * len(parts)
        for place, row in zip(chain.from_iterable(places.values()), rows_of(pieces, self.format), strict=True):
            in_order[place] = row
        return in_order

    def bad_with(self, index: int) -> range:
        (part,), _ = self._reader.places([index])
        return range(self._reader.first_of(part), int(self.index["stop"][part]))

    @cached_property
    def _reader(self) -> TableReader:
        return TableReader(self.index, self.keep, lambda row, *place: self.read_part(self.file_of(row), *place))

    def touch(self, file: ByteFile, size: int) -> None:
        """Prepare to take rows of about ``size`` bytes from a part of a file that has been read, or mapped.

        Raises:
            SampleError: the file is not as it was.
        """

    def finished(self, rows: list[dict[str, Any]], parts: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples that rows become, each of one of ``parts``.

        Raises:
            SampleError: one of them cannot be read.
        """
        return rows


def check_columns(source: TableSource, names: Sequence[str], place: str) -> None:
    """Raise ConfigError, which names the file and the nearest column, if one is missing that ``source`` needs."""
    for name in (*(source.columns or ()), *([] if source.length_column is None else [source.length_column])):
        if name not in names:
            raise ConfigError(f"{place}: there is no column {name!r}{neighbours(name, names)}")


def _lengths_in(source: TableSource, file: ByteFile, parts: Sequence[PlacedPart]) -> Mapping[str, Array]:
    """Read the lengths of the samples in the parts of a file, if there is a column of them."""
    if source.length_column is None:
        return {}
    only = replace(source, columns=[source.length_column])
    lengths = [_column(only, file, part) for part in parts]
    return {"size": numpy.concatenate([numpy.empty(0, dtype=numpy.int64), *lengths])}


def _column(source: TableSource, file: ByteFile, part: PlacedPart) -> Array:
    """Read the only column of a part of a file, whole numbers: int64 [rows]."""
    try:
        values: Array = source.read_part(file, part.start, part.number)[0].column(0).to_numpy(zero_copy_only=False)
    except SampleError as error:
        if source.on_error == "stop":
            raise
        _logger.warning("samples whose length cannot be read have the length 0: %s", error)
        return numpy.zeros(part.rows, dtype=numpy.int64)
    if values.dtype.kind not in "iu":
        raise ConfigError(
            f"{file.name}, byte {part.start}: column {source.length_column!r} holds more than whole numbers. "
            "Name another as length_column, or mend the file."
        )
    lengths: Array = values.astype(numpy.int64)
    return lengths
