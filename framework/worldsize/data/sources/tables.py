"""Samples that are rows of tables in parts, of which a process keeps those that it has read last."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple, final

import numpy

from worldsize.core import OneOf, Range
from worldsize.data.sources.indexed import Array, IndexedSource
from worldsize.data.storage.byte_files import ByteFile, SampleError
from worldsize.data.storage.index import Scan
from worldsize.errors import ConfigError, missing_extra, neighbours

Table = Any  # pyarrow's Table or RecordBatch
_KEPT = 1024  # parts that a process keeps at most, even if they take no memory


def arrow() -> Any:
    """Import pyarrow, which is an extra and takes time."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise missing_extra("Reading tables", package="pyarrow", extra="data") from None
    return pyarrow


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
    """

    columns: Sequence[str] | None = None
    format: Annotated[str, OneOf("python", "numpy")] = "python"
    keep: Annotated[float, Range(least=0, hint="it is in bytes")] = 256e6

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
        return f"{type(self).__name__}-1 columns={self.columns}"  # which are sought in each file that is indexed

    def scanner(self) -> Scan:
        rows = 0

        def scan(file: ByteFile) -> Iterator[Mapping[str, Array]]:
            nonlocal rows
            found = [part for part in self.parts(file) if part.rows]
            stops = rows + numpy.cumsum([part.rows for part in found], dtype=numpy.uint64)
            rows += sum(part.rows for part in found)
            starts = numpy.array([part.start for part in found], dtype=numpy.uint64)
            yield {"stop": stops, "start": starts, "number": numpy.array([part.number for part in found], numpy.uint32)}

        return scan

    def __len__(self) -> int:
        return int(self.index["stop"][-1])

    def sample(self, index: int) -> dict[str, Any]:
        return self.rows_of(int(self._parts_of([index])[0]), [index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Read the samples of one part together, whatever their order."""
        if not all(0 <= index < len(self) for index in indices):
            return super().__getitems__(indices)
        parts = self._parts_of(indices)
        samples: dict[int, Any] = {}
        for part in dict.fromkeys(parts.tolist()):
            places = numpy.flatnonzero(parts == part).tolist()
            wanted = [indices[place] for place in places]
            try:
                samples.update(zip(places, self.rows_of(part, wanted), strict=True))
            except SampleError:
                samples.update(zip(places, super().__getitems__(wanted), strict=True))
        return [samples[place] for place in range(len(indices))]

    def following(self, index: int) -> int:
        return int(self.index["stop"][self._parts_of([index])[0]])

    def _parts_of(self, indices: Sequence[int]) -> Array:
        wanted = numpy.array(indices, dtype=numpy.uint64)  # a signed number would be compared as a float
        return numpy.searchsorted(self.index["stop"], wanted, side="right")

    @cached_property
    def _recent(self) -> _Recent:
        return _Recent(self.keep)

    def rows_of(self, part: int, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return samples of one part."""
        return to_rows(self.table_of(part, indices), self.format)

    def table_of(self, part: int, indices: Sequence[int]) -> Table:
        """Return samples of one part as a table."""
        first = int(self.index["stop"][part - 1]) if part else 0
        start, number = int(self.index["start"][part]), int(self.index["number"][part])
        table = self._recent.get(part, lambda: self.read_part(self.file_of(part), start, number))
        if len(indices) == 1:
            return table.slice(indices[0] - first, 1)
        return table.take(arrow().array([index - first for index in indices], type=arrow().int64()))


@final
class _Recent:
    """Keeps the tables read last, up to a number of bytes."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[int, tuple[Table, float]] = OrderedDict()
        self._bytes = 0.0

    def get(self, number: int, read: Callable[[], tuple[Table, float]]) -> Table:
        """Return table ``number``, which ``read`` reads if it is not kept."""
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number][0]
        table, size = read()
        self._kept[number] = table, size
        self._bytes += size
        while len(self._kept) > 1 and (self._bytes > self._capacity or len(self._kept) > _KEPT):
            self._bytes -= self._kept.popitem(last=False)[1][1]
        return table


def check_columns(columns: Sequence[str] | None, names: Sequence[str], place: str) -> None:
    """Raise ConfigError, which names the file and the nearest column, if one is missing."""
    for name in columns or ():
        if name not in names:
            raise ConfigError(f"{place}: there is no column {name!r}{neighbours(name, names)}")


def to_rows(table: Table, form: str) -> list[dict[str, Any]]:
    """Return each row as a dict."""
    if form == "python":
        rows: list[dict[str, Any]] = table.to_pylist()
        return rows
    names = table.schema.names
    columns = [_values(table.column(number)) for number in range(len(names))]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _values(column: Any) -> list[Any]:
    """Return a column's values: numbers of NumPy, arrays where they are lists of numbers, or Python's own objects."""
    types = arrow().types
    chunks = getattr(column, "chunks", [column])
    kind = column.type
    if _is_number(kind):
        return [value for chunk in chunks for value in chunk.to_numpy(zero_copy_only=False)]
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and _is_number(kind.value_type):
        return [_array(item.values) for chunk in chunks for item in chunk]
    values: list[Any] = column.to_pylist()
    return values


def _array(values: Any) -> Any:
    """Return a list of numbers as an array that its owner may write to."""
    if values is None:
        return None
    array = values.to_numpy(zero_copy_only=False)
    return array if array.flags.writeable else array.copy()


def _is_number(kind: Any) -> bool:
    types = arrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
