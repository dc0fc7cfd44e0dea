"""Samples that are rows of Parquet files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, final

from worldsize.data.sources.table_parts import Table, arrow
from worldsize.data.sources.tables import PlacedPart, TableSource, check_columns
from worldsize.data.storage.byte_files import ByteFile, SampleError
from worldsize.data.storage.reader import ByteReader

_OPEN = 64  # files whose footers a process keeps


@final
@dataclass(frozen=True)
class Parquet(TableSource):
    """Rows of Parquet files.

    A row group is decoded as a whole, and kept while there is room. So random access to row groups that are many or
    large takes long: shuffle in blocks of a row group or less, and make ``keep`` as large as a window of them.
    """

    endings: ClassVar[Sequence[str]] = (".parquet", ".pq")

    def parts(self, file: ByteFile) -> Iterator[PlacedPart]:
        facts = _opened(file).metadata
        place = f"{file.name}, byte {max(file.size - 8 - facts.serialized_size, 0)}"
        check_columns(self, _opened(file).schema_arrow.names, place)
        for number in range(facts.num_row_groups):
            group = facts.row_group(number)
            starts = [_first_byte(group.column(column)) for column in range(group.num_columns)]
            yield PlacedPart(min(starts, default=0), number, group.num_rows)

    def read_part(self, file: ByteFile, start: int, number: int) -> tuple[Table, float]:
        columns = None if self.columns is None else list(self.columns)
        try:
            table = _opened(file).read_row_group(number, columns=columns, use_threads=False).combine_chunks()
        except (arrow().ArrowException, OSError) as error:
            raise SampleError(f"{file.name}, byte {start}: row group {number} does not decode: {error}.") from None
        batches = table.to_batches()
        return batches[0] if len(batches) == 1 else table, table.nbytes


def _first_byte(column: Any) -> int:
    return int(column.dictionary_page_offset or column.data_page_offset)


@lru_cache(_OPEN)
def _opened(file: ByteFile) -> Any:
    try:
        return arrow().parquet.ParquetFile(ByteReader(file), page_checksum_verification=True)
    except (arrow().ArrowException, OSError) as error:
        raise SampleError(f"{file.name}, byte {max(file.size - 8, 0)}: it is no Parquet file: {error}.") from None
