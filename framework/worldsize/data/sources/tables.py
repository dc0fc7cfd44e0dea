"""Rows of tables as samples; tables are read in parts, which each process caches."""

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
from worldsize.data.sources.table_parts import FEW, Table, TableReader, convert_rows
from worldsize.data.storage.byte_files import ByteFile, SampleError
from worldsize.data.storage.index import Scan
from worldsize.errors import ConfigError, neighbours

_logger = logging.getLogger(__name__)


class PlacedPart(NamedTuple):
    """A part of a file: byte offset, index among the file's parts, and number of rows."""

    start: int
    number: int
    rows: int


@dataclass(frozen=True)
class TableSource(IndexedSource):
    """Base class of sources of table rows; a sample is a dict of columns.

    Args:
        columns: the columns to read; None reads all.
        format: "python": numbers, strings, lists and dicts; "numpy": NumPy scalars for numbers, and arrays for lists
            of numbers, which are collated to tensors.
        keep: bytes of decoded parts to cache per process; the most recent part is always cached.
        length_column: an integer column with the length of each sample, for ``length_balanced``. It is read once, for
            the index. Samples in unreadable parts have length 0 if they are skipped.
    """

    columns: Sequence[str] | None = None
    format: Annotated[str, OneOf("python", "numpy")] = "python"
    keep: Annotated[float, Range(least=0, hint="the unit is bytes")] = 256e6
    length_column: str | None = None

    @abstractmethod
    def list_parts(self, file: ByteFile) -> Iterator[PlacedPart]:
        """Yield the parts of a file.

        Raises:
            SampleError: the file has the wrong format.
            ConfigError: a required column is missing.
        """

    @abstractmethod
    def read_part(self, file: ByteFile, start: int, number: int) -> tuple[Table, float]:
        """Read a part of a file; return it and its memory in bytes.

        Raises:
            SampleError: the part cannot be read.
        """

    @property
    def kind(self) -> str:
        kind = f"{type(self).__name__}-1 columns={self.columns}"  # indexing checks that the columns exist
        if self.length_column is None:
            return kind
        return f"{kind} length_column={self.length_column} on_error={self.on_error}"

    def create_scanner(self) -> Scan:
        rows = 0

        def scan_parts(file: ByteFile) -> Iterator[Mapping[str, Array]]:
            nonlocal rows
            parts = [part for part in self.list_parts(file) if part.rows]
            stops = rows + numpy.cumsum([part.rows for part in parts], dtype=numpy.uint64)
            rows += sum(part.rows for part in parts)
            starts = numpy.array([part.start for part in parts], dtype=numpy.uint64)
            numbers = numpy.array([part.number for part in parts], numpy.uint32)
            yield {"stop": stops, "start": starts, "number": numbers, **_lengths_in(self, file, parts)}

        return scan_parts

    def __len__(self) -> int:
        return int(self.index["stop"][-1])

    def sample(self, index: int) -> dict[str, Any]:
        parts, numbers = self._reader.locate_samples([index])
        return self.convert_rows(self._read_rows(parts, numbers), parts)[0]

    def read_each(self, indices: Sequence[int]) -> list[Any]:
        """Read several samples in order; samples in one part are read together."""
        if not indices or min(indices) < 0 or max(indices) >= len(self):
            return super().read_each(indices)
        parts, numbers = self._reader.locate_samples(indices)
        try:
            return self.convert_rows(self._read_rows(parts, numbers), parts)
        except SampleError:  # at least one is bad: read them one by one, following on_error
            return super().read_each(indices)

    def _read_rows(self, parts: Sequence[int], numbers: Sequence[int]) -> list[dict[str, Any]]:
        """Return samples in order, given the part of each sample and its row in that part."""
        counts, sizes = Counter(parts), Counter[int]()
        tables = {part: self._reader.get_part(part) for part in counts}
        for part, file in zip(counts, self.index["file"][[*counts]].tolist(), strict=True):
            sizes[file] += counts[part] * tables[part].row_bytes
        for file, size in sizes.items():
            self.record_access(self.files[file], size)
        if self.format == "python" and len(parts) < FEW * len(counts):
            return [tables[part].get_row(number) for part, number in zip(parts, numbers, strict=True)]
        places: dict[int, list[int]] = {part: [] for part in counts}
        for place, part in enumerate(parts):
            places[part].append(place)
        pieces = [
            piece
            for part, table in tables.items()
            for piece in table.slice_rows([numbers[place] for place in places[part]])
        ]
        in_order: list[Any] = [None] * len(parts)
        for place, row in zip(chain.from_iterable(places.values()), convert_rows(pieces, self.format), strict=True):
            in_order[place] = row
        return in_order

    def find_bad_range(self, index: int) -> range:
        (part,), _ = self._reader.locate_samples([index])
        return range(self._reader.get_first_sample(part), int(self.index["stop"][part]))

    @cached_property
    def _reader(self) -> TableReader:
        return TableReader(self.index, self.keep, lambda row, *place: self.read_part(self.get_row_file(row), *place))

    def record_access(self, file: ByteFile, size: int) -> None:
        """Hook that is called before about ``size`` bytes of rows are taken from parts of ``file``.

        Raises:
            SampleError: the file has changed.
        """

    def convert_rows(self, rows: list[dict[str, Any]], parts: Sequence[int]) -> list[dict[str, Any]]:
        """Hook to convert rows to samples; ``parts`` has the part of each row.

        Raises:
            SampleError: a row cannot be converted.
        """
        return rows


def check_columns(source: TableSource, names: Sequence[str], place: str) -> None:
    """Raise ConfigError, with the most similar name, if a column of ``source`` is missing."""
    for name in (*(source.columns or ()), *([] if source.length_column is None else [source.length_column])):
        if name not in names:
            raise ConfigError(f"{place}: column {name!r} not found{neighbours(name, names)}")


def _lengths_in(source: TableSource, file: ByteFile, parts: Sequence[PlacedPart]) -> Mapping[str, Array]:
    """Read the sample lengths in the parts of a file, if ``length_column`` is set."""
    if source.length_column is None:
        return {}
    only = replace(source, columns=[source.length_column])
    lengths = [_read_lengths(only, file, part) for part in parts]
    return {"size": numpy.concatenate([numpy.empty(0, dtype=numpy.int64), *lengths])}


def _read_lengths(source: TableSource, file: ByteFile, part: PlacedPart) -> Array:
    """Read the only selected column of a part, which must hold integers: int64 [rows]."""
    try:
        values: Array = source.read_part(file, part.start, part.number)[0].column(0).to_numpy(zero_copy_only=False)
    except SampleError as error:
        if source.on_error == "stop":
            raise
        _logger.warning("failed to read sample lengths; using length 0: %s", error)
        return numpy.zeros(part.rows, dtype=numpy.int64)
    if values.dtype.kind not in "iu":
        raise ConfigError(
            f"{file.name}, byte {part.start}: column {source.length_column!r} contains values other than integers. "
            "Choose a different length_column, or repair the file."
        )
    lengths: Array = values.astype(numpy.int64)
    return lengths
