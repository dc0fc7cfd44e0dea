"""Parts of tables that a process has read: found by a sample's number, kept while there is room, cut into rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy
from numpy.typing import NDArray

from worldsize.errors import missing_extra

Array = NDArray[Any]
Table = Any  # pyarrow's Table or RecordBatch
FEW = 16
"""So many rows of one part are taken one by one, in less time than it takes to gather them."""

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


@final
class TablePart:
    """A part of a table in memory, or mapped into it."""

    def __init__(self, table: Table) -> None:
        self._table, self._columns = table, list(zip(table.schema.names, table.columns, strict=True))
        self.row_bytes = table.nbytes // max(table.num_rows, 1)

    def row(self, number: int) -> dict[str, Any]:
        """Return one row as a dict of Python's own objects, in less time than a slice takes."""
        return {name: column[number].as_py() for name, column in self._columns}

    def pieces(self, numbers: list[int]) -> list[Table]:
        """Return the rows of these numbers as tables, which are views of this one unless the rows are many."""
        first, count = numbers[0], len(numbers)
        if count == 1 or numbers == list(range(first, first + count)):
            return [self._table.slice(first, count)]
        if count < FEW:
            return [self._table.slice(number, 1) for number in numbers]
        return [self._table.take(arrow().array(numbers, type=arrow().int64()))]


def rows_of(pieces: Sequence[Table], form: str) -> list[dict[str, Any]]:
    """Return all rows of tables as dicts, in the form that :class:`TableSource` describes."""
    if len(pieces) > 1:
        try:
            pieces = [_joined(pieces)]  # what is of one table is converted at once
        except arrow().ArrowInvalid:  # the columns of files differ
            return [row for piece in pieces for row in rows_of([piece], form)]
    (table,) = pieces
    names = table.schema.names
    values = [column.to_pylist() if form == "python" else _values(column) for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)] or [{}] * table.num_rows


def _joined(pieces: Sequence[Table]) -> Table:
    batch, table = arrow().RecordBatch, arrow().Table
    if all(isinstance(piece, batch) for piece in pieces):
        return arrow().concat_batches(pieces)
    return arrow().concat_tables([table.from_batches([each]) if isinstance(each, batch) else each for each in pieces])


@final
class TableReader:
    """Finds samples in the parts of tables, and keeps the parts read last.

    Args:
        index: of each part, the number of samples up to its end, and its place in its file.
        capacity: bytes of parts that are kept; the part read last is kept in any case.
        read: reads a part and says how many bytes it takes, given its number, where it begins and its place among the
            parts of its file.
    """

    def __init__(
        self, index: Mapping[str, Array], capacity: float, read: Callable[[int, int, int], tuple[Table, float]]
    ) -> None:
        self._stops, self._starts, self._numbers = index["stop"], index["start"], index["number"]
        self._capacity, self._read = capacity, read
        self._kept: OrderedDict[int, tuple[TablePart, float]] = OrderedDict()
        self._bytes = 0.0

    def places(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the part in which each sample is, and its row in that part."""
        wanted = numpy.array(indices, dtype=numpy.uint64)  # a signed number would be compared as a float
        parts = numpy.searchsorted(self._stops, wanted, side="right")
        firsts = numpy.where(parts > 0, self._stops[parts - 1], 0).astype(numpy.uint64)
        return parts.tolist(), (wanted - firsts).tolist()

    def first_of(self, part: int) -> int:
        """Return the number of a part's first sample."""
        return int(self._stops[part - 1]) if part else 0

    def part(self, number: int) -> TablePart:
        """Return a part, which is read if it is not kept."""
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number][0]
        table, size = self._read(number, int(self._starts[number]), int(self._numbers[number]))
        self._kept[number] = TablePart(table), size
        self._bytes += size
        while len(self._kept) > 1 and (self._bytes > self._capacity or len(self._kept) > _KEPT):
            self._bytes -= self._kept.popitem(last=False)[1][1]
        return self._kept[number][0]


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
