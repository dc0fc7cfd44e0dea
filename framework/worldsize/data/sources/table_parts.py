"""Cache of table parts, such as row groups, and their conversion to rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy
from numpy.typing import NDArray

from worldsize.errors import require

Array = NDArray[Any]
Table = Any  # pyarrow's Table or RecordBatch
FEW = 16
"""Number of rows of a part from which gathering them is faster than taking them one by one."""

_KEPT = 1024  # maximum number of cached parts per process, even if they are memory-mapped


def import_arrow() -> Any:
    """Import pyarrow on first use, since it is an optional dependency and slow to import."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        require("Reading tables", "pyarrow", extra="data")
        raise
    return pyarrow


@final
class TablePart:
    """A part of a table, in memory or memory-mapped."""

    def __init__(self, table: Table) -> None:
        self._table, self._columns = table, list(zip(table.schema.names, table.columns, strict=True))
        self.row_bytes = table.nbytes // max(table.num_rows, 1)

    def get_row(self, number: int) -> dict[str, Any]:
        """Return one row as a dict of Python objects; faster than slicing the table."""
        return {name: column[number].as_py() for name, column in self._columns}

    def slice_rows(self, numbers: list[int]) -> list[Table]:
        """Return the given rows as tables: a copy for many scattered rows, otherwise views."""
        first, count = numbers[0], len(numbers)
        if count == 1 or numbers == list(range(first, first + count)):
            return [self._table.slice(first, count)]
        if count < FEW:
            return [self._table.slice(number, 1) for number in numbers]
        return [self._table.take(import_arrow().array(numbers, type=import_arrow().int64()))]


def convert_rows(pieces: Sequence[Table], form: str) -> list[dict[str, Any]]:
    """Return all rows as dicts; ``form`` is the ``format`` of :class:`TableSource`."""
    if len(pieces) > 1:
        try:
            pieces = [_concat_pieces(pieces)]  # converting once is faster
        except import_arrow().ArrowInvalid:  # the files have different columns
            return [row for piece in pieces for row in convert_rows([piece], form)]
    (table,) = pieces
    names = table.schema.names
    values = [column.to_pylist() if form == "python" else _convert_column(column) for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)] or [{}] * table.num_rows


def _concat_pieces(pieces: Sequence[Table]) -> Table:
    batch, table = import_arrow().RecordBatch, import_arrow().Table
    if all(isinstance(piece, batch) for piece in pieces):
        return import_arrow().concat_batches(pieces)
    return import_arrow().concat_tables(
        [table.from_batches([each]) if isinstance(each, batch) else each for each in pieces]
    )


@final
class TableReader:
    """Locates samples in table parts, and caches the most recently used ones.

    Args:
        index: for each part, the cumulative number of samples (``stop``), and its byte offset (``start``) and index
            (``number``) in its file.
        capacity: bytes of parts to cache; the most recent part is always cached.
        read: takes a part's overall index, its byte offset and its index in its file; returns the part and its size
            in bytes.
    """

    def __init__(
        self, index: Mapping[str, Array], capacity: float, read: Callable[[int, int, int], tuple[Table, float]]
    ) -> None:
        self._stops, self._starts, self._numbers = index["stop"], index["start"], index["number"]
        self._capacity, self._read = capacity, read
        self._kept: OrderedDict[int, tuple[TablePart, float]] = OrderedDict()
        self._bytes = 0.0

    def locate_samples(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the part of each sample, and its row in that part."""
        wanted = numpy.array(indices, dtype=numpy.uint64)  # int64 and uint64 would be compared as floats
        parts = numpy.searchsorted(self._stops, wanted, side="right")
        firsts = numpy.where(parts > 0, self._stops[parts - 1], 0).astype(numpy.uint64)
        return parts.tolist(), (wanted - firsts).tolist()

    def get_first_sample(self, part: int) -> int:
        """Return the index of the first sample in a part."""
        return int(self._stops[part - 1]) if part else 0

    def get_part(self, number: int) -> TablePart:
        """Return a part from the cache, or read it."""
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number][0]
        table, size = self._read(number, int(self._starts[number]), int(self._numbers[number]))
        self._kept[number] = TablePart(table), size
        self._bytes += size
        while len(self._kept) > 1 and (self._bytes > self._capacity or len(self._kept) > _KEPT):
            self._bytes -= self._kept.popitem(last=False)[1][1]
        return self._kept[number][0]


def _convert_column(column: Any) -> list[Any]:
    """Return values as NumPy scalars, arrays (for lists of numbers), or Python objects."""
    types = import_arrow().types
    chunks = getattr(column, "chunks", [column])
    kind = column.type
    if _is_number(kind):
        return [value for chunk in chunks for value in chunk.to_numpy(zero_copy_only=False)]
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list and _is_number(kind.value_type):
        return [_convert_array(item.values) for chunk in chunks for item in chunk]
    values: list[Any] = column.to_pylist()
    return values


def _convert_array(values: Any) -> Any:
    """Convert a list of numbers to a writable array."""
    if values is None:
        return None
    array = values.to_numpy(zero_copy_only=False)
    return array if array.flags.writeable else array.copy()


def _is_number(kind: Any) -> bool:
    types = import_arrow().types
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))
