"""Samples in JSON-lines files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy

from worldsize.data.source import Array, IndexedSource, refuse_compressed
from worldsize.data.storage.byte_files import ByteFile, SampleError
from worldsize.data.storage.index import Scan
from worldsize.errors import neighbours

_BLOCK = 8 << 20  # bytes to search for line ends at once
_NEWLINE = ord("\n")
_BLANKS = b" \t\r\n"
_IS_BLANK = numpy.isin(numpy.arange(256), list(_BLANKS))
_LONGEST = 2**32 - 1  # maximum bytes per line; the index stores 32-bit sizes


@final
@dataclass(frozen=True)
class JsonLines(IndexedSource):
    """Files with one JSON sample per line; blank lines are ignored.

    A sample is the parsed line: an object becomes a dict.

    Args:
        columns: the keys to read from each object, all of them required; None reads all keys.
    """

    columns: Sequence[str] | None = None

    endings: ClassVar[Sequence[str]] = (".jsonl", ".ndjson", ".json")

    @property
    def kind(self) -> str:
        return "json_lines-1"

    def create_scanner(self) -> Scan:
        return _index_lines

    def __len__(self) -> int:
        return len(self.index["start"])

    def sample(self, index: int) -> Any:
        start = int(self.index["start"][index])
        file = self.get_row_file(index)
        line = file.read(start, start + int(self.index["size"][index]))
        try:
            parsed = json.loads(line)
        except json.JSONDecodeError as error:
            place = start + len(error.doc[: error.pos].encode(errors="surrogatepass"))
            raise SampleError(f"{file.name}, byte {place}: the line is not valid JSON: {error.msg}.") from None
        except (ValueError, RecursionError) as error:  # not UTF-8, an oversized integer, or nested too deeply
            raise SampleError(f"{file.name}, byte {start}: the line is not valid JSON: {error}.") from None
        return parsed if self.columns is None else _select_columns(parsed, self.columns, f"{file.name}, byte {start}")


def _select_columns(parsed: Any, columns: Sequence[str], place: str) -> dict[str, Any]:
    if not isinstance(parsed, dict):
        raise SampleError(f"{place}: data.columns requires each line to be a JSON object. Set data.columns=null.")
    try:
        return {name: parsed[name] for name in columns}
    except KeyError as error:
        missing = error.args[0]
        raise SampleError(f"{place}: column {missing!r} not found{neighbours(missing, parsed)}") from None


def _index_lines(file: ByteFile) -> Iterator[dict[str, Array]]:
    """Yield the starts and sizes (without the newline) of the nonblank lines, in blocks."""
    refuse_compressed(file)
    begun, blank = 0, True  # start of the line that continues in this block; whether it is blank so far
    for first in range(0, file.size, _BLOCK):
        data = file.read(first, min(first + _BLOCK, file.size))
        bytes_b = numpy.frombuffer(data, numpy.uint8)
        ends = numpy.flatnonzero(bytes_b == _NEWLINE)
        if len(ends) == 0:
            blank = blank and not data.strip(_BLANKS)
            continue
        starts = numpy.concatenate(([0], ends[:-1] + 1))
        kept = ~_IS_BLANK[bytes_b[starts]]
        for each in numpy.flatnonzero(~kept):  # the few lines that begin with whitespace
            kept[each] = bool(data[starts[each] : ends[each]].strip(_BLANKS))
        kept[0] |= not blank
        positions = starts.astype(numpy.uint64) + numpy.uint64(first)
        positions[0] = begun
        sizes = ends.astype(numpy.uint64) + numpy.uint64(first) - positions
        yield _build_columns(file, positions[kept], sizes[kept])
        begun = first + int(ends[-1]) + 1
        blank = not data[ends[-1] + 1 :].strip(_BLANKS)
    if not blank:
        yield _build_columns(file, numpy.array([begun]), numpy.array([file.size - begun]))


def _build_columns(file: ByteFile, starts: Array, sizes: Array) -> dict[str, Array]:
    if len(sizes) and sizes.max() > _LONGEST:
        raise SampleError(
            f"{file.name}, byte {starts[sizes.argmax()]}: the line is longer than 4 GiB. "
            "Check that the file has the JSON lines format."
        )
    return {"start": starts.astype(numpy.uint64), "size": sizes.astype(numpy.uint32)}
