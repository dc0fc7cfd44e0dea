"""Rows of Arrow files, Parquet files, and Hugging Face data sets as samples.

Local Arrow files are memory-mapped. :class:`HfDataset` reads the Arrow files written by ``save_to_disk``.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, final

from worldsize.core import ConfigError
from worldsize.data.sources.images import FORMATS, decode_content
from worldsize.data.sources.table_parts import Table, import_arrow
from worldsize.data.sources.tables import PlacedPart, TableSource, check_columns
from worldsize.data.storage.byte_files import (
    COUNTS,
    ByteFile,
    ByteReader,
    LocalFile,
    Opened,
    SampleError,
    strip_secrets,
)
from worldsize.data.storage.listing import open_files
from worldsize.errors import neighbours
from worldsize.strict_json import LARGEST, parse_strict_json

_OPEN = 64  # maximum number of open files per process
_FOOTED = b"ARROW1"  # magic bytes of the file format: a stream with a footer
_FIRST = 8  # first byte of the stream in the file format


@dataclass(frozen=True)
class ArrowSource(TableSource):
    """Base class for rows of Arrow record batches in IPC files (Feather) or streams.

    Local files are memory-mapped, so that reading a sample only reads its pages.
    """

    def list_parts(self, file: ByteFile) -> Iterator[PlacedPart]:
        messages = _open_messages(file)
        check_columns(self, messages.schema.names, f"{file.name}, byte 0")
        for number, (start, rows) in enumerate(messages.list_batch_starts()):
            yield PlacedPart(start, number, rows)

    def read_part(self, file: ByteFile, start: int, number: int) -> tuple[Table, float]:
        batch = _open_messages(file).read_batch(start)
        if self.columns is not None:
            batch = batch.select(list(self.columns))
        return batch, _open_messages(file).measure_memory(batch)

    def record_access(self, file: ByteFile, size: int) -> None:
        if isinstance(file, LocalFile):
            _open_messages(file).check_size()
            COUNTS.read += size  # page reads of a mapped file are not counted elsewhere


@final
@dataclass(frozen=True)
class Arrow(ArrowSource):
    """Rows of Arrow files: Feather, IPC files and IPC streams."""

    endings: ClassVar[Sequence[str]] = (".arrow", ".feather", ".ipc")


@final
class _Messages:
    """Record batches of an open file, accessed by their byte offset."""

    def __init__(self, file: ByteFile) -> None:
        if file.size == 0:
            raise SampleError(f"{file.name}, byte 0: the file is empty. Copy the file again.")
        self._file = file
        self._opened: Opened | None = None
        self._mapped: Any = None
        if isinstance(file, LocalFile):
            self._opened, self._mapped = _map_file(file)
        self._first = _FIRST if file.read(0, min(len(_FOOTED), file.size)) == _FOOTED else 0
        schema, self._begin = self._read_message(self._first)
        try:
            self.schema = import_arrow().ipc.read_schema(schema)
        except (import_arrow().ArrowException, OSError) as error:
            raise SampleError(f"{file.name}, byte {self._first}: not an Arrow file: {error}.") from None
        if any(import_arrow().types.is_dictionary(field.type) for field in self.schema):
            raise SampleError(
                f"{file.name}, byte {self._first}: dictionary-encoded columns do not support random access. Write "
                "them as plain columns."
            )

    def check_size(self) -> None:
        """Raise SampleError if a mapped file has shrunk; reading lost pages kills the process."""
        if self._opened is not None:
            _check_size(self._opened, self._file)

    def list_batch_starts(self) -> Iterator[tuple[int, int]]:
        """Yield the byte offset and the number of rows of each record batch."""
        start = self._begin
        while start < self._file.size:
            message, stop = self._read_message(start)
            if message is None:
                return
            yield start, self._decode_batch(message, start).num_rows
            start = stop
        raise SampleError(f"{self._file.name}, byte {start}: missing end-of-stream marker. Copy the file again.")

    def read_batch(self, start: int) -> Table:
        """Read the record batch at byte offset ``start``."""
        return self._decode_batch(self._read_message(start)[0], start)

    def measure_memory(self, batch: Table) -> int:
        """Return the memory of ``batch`` in bytes, without memory-mapped buffers."""
        buffers = [each for column in batch.columns for each in column.buffers() if each is not None]
        if self._mapped is None:
            return sum(each.size for each in buffers)
        first, last = self._mapped.address, self._mapped.address + self._mapped.size
        return sum(each.size for each in buffers if not first <= each.address < last)

    def _decode_batch(self, message: Any, start: int) -> Table:
        try:
            return import_arrow().ipc.read_record_batch(message, self.schema)
        except (import_arrow().ArrowException, OSError, TypeError) as error:
            raise SampleError(f"{self._file.name}, byte {start}: failed to decode the record batch: {error}.") from None

    def _read_message(self, start: int) -> tuple[Any, int]:
        """Return the message at a byte offset, and its end; (None, offset) after the last message."""
        self.check_size()
        if self._mapped is None:
            source = import_arrow().PythonFile(ByteReader(self._file), mode="r")
            source.seek(start)
        else:
            source = import_arrow().BufferReader(self._mapped.slice(start))
        try:
            message = import_arrow().ipc.read_message(source)
        except EOFError:
            return None, start
        except (import_arrow().ArrowException, OSError) as error:
            raise SampleError(f"{self._file.name}, byte {start}: failed to read an Arrow message: {error}.") from None
        return message, source.tell() + (0 if self._mapped is None else start)


def _map_file(file: LocalFile) -> tuple[Opened, Any]:
    try:
        opened = file.open_descriptor()
        _check_size(opened, file)
        return opened, import_arrow().py_buffer(mmap.mmap(opened.descriptor, file.size, prot=mmap.PROT_READ))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SampleError(f"{file.name}, byte 0: failed to memory-map the file: {reason}.") from None


def _check_size(opened: Opened, file: ByteFile) -> None:
    if (size := os.fstat(opened.descriptor).st_size) < file.size:
        raise SampleError(
            f"{file.name}, byte {size}: unexpected end of file, expected {file.size:,} bytes. Copy the file again."
        )


@lru_cache(_OPEN)
def _open_messages(file: ByteFile) -> _Messages:
    return _Messages(file)


_OPEN_FOOTERS = 64  # maximum number of Parquet footers in memory per process


@final
@dataclass(frozen=True)
class Parquet(TableSource):
    """Rows of Parquet files.

    A row group is always decoded in full, and cached in up to ``keep`` bytes. Random access to many or large row
    groups is therefore slow: shuffle in blocks of at most one row group, and set ``keep`` to the size of a window.
    """

    endings: ClassVar[Sequence[str]] = (".parquet", ".pq")

    def list_parts(self, file: ByteFile) -> Iterator[PlacedPart]:
        facts = _open_parquet(file).metadata
        place = f"{file.name}, byte {max(file.size - 8 - facts.serialized_size, 0)}"
        check_columns(self, _open_parquet(file).schema_arrow.names, place)
        for number in range(facts.num_row_groups):
            group = facts.row_group(number)
            starts = [_first_byte(group.column(column)) for column in range(group.num_columns)]
            yield PlacedPart(min(starts, default=0), number, group.num_rows)

    def read_part(self, file: ByteFile, start: int, number: int) -> tuple[Table, float]:
        columns = None if self.columns is None else list(self.columns)
        try:
            table = _open_parquet(file).read_row_group(number, columns=columns, use_threads=False).combine_chunks()
        except (import_arrow().ArrowException, OSError) as error:
            raise SampleError(f"{file.name}, byte {start}: failed to decode row group {number}: {error}.") from None
        batches = table.to_batches()
        return batches[0] if len(batches) == 1 else table, table.nbytes


def _first_byte(column: Any) -> int:
    return int(column.dictionary_page_offset or column.data_page_offset)


@lru_cache(_OPEN_FOOTERS)
def _open_parquet(file: ByteFile) -> Any:
    try:
        return import_arrow().parquet.ParquetFile(ByteReader(file), page_checksum_verification=True)
    except (import_arrow().ArrowException, OSError) as error:
        raise SampleError(f"{file.name}, byte {max(file.size - 8, 0)}: not a Parquet file: {error}.") from None


@final
@dataclass(frozen=True)
class HfDataset(ArrowSource):
    """Rows of a Hugging Face ``Dataset`` or ``DatasetDict`` saved with ``save_to_disk``.

    Columns have their Arrow values, so class labels are integers. Images are decoded by Pillow.

    Args:
        split: the split to read; required for a ``DatasetDict``.
        image_formats: image formats to decode, by their Pillow names.
    """

    split: str | None = None
    image_formats: Sequence[str] = FORMATS

    @property
    def _folder(self) -> str:
        if not isinstance(self.path, str) or not self.path:
            shown = [strip_secrets(each) for each in self.path]
            raise ConfigError(f"data.path must be a single folder written by save_to_disk, got {shown}.")
        return self.path.rstrip("/")

    @cached_property
    def folder(self) -> str:
        """Folder of the chosen split, or of the data set if it has no splits."""
        try:
            file = self._open_file(f"{self._folder}/dataset_dict.json")
        except ConfigError:
            return self._folder  # no splits, or no such folder: opening its files then raises the error
        known = [str(each) for each in _read_json_entry(file, "splits", list)]
        if self.split not in known:
            said = "no split selected" if self.split is None else f"unknown split {self.split!r}"
            raise ConfigError(
                f"{strip_secrets(self._folder)}: {said}{neighbours(self.split or '', known)} Set data.split."
            )
        return f"{self._folder}/{self.split}"

    @cached_property
    def files(self) -> Sequence[ByteFile]:
        state = self._open_file(f"{self.folder}/state.json")
        listed = _read_json_entry(state, "_data_files", list)
        if not listed or not all(isinstance(each, dict) and isinstance(each.get("filename"), str) for each in listed):
            raise ConfigError(f"{state.name} does not list any data files. Save the data set again with save_to_disk.")
        return [file for each in listed for file in open_files(f"{self.folder}/{each['filename']}", self.cache)]

    @cached_property
    def _images(self) -> Sequence[str]:
        """Names of the selected columns with images."""
        features = _read_json_entry(self._open_file(f"{self.folder}/dataset_info.json"), "features", dict)
        images = [name for name, kind in features.items() if isinstance(kind, dict) and kind.get("_type") == "Image"]
        return [name for name in images if self.columns is None or name in self.columns]

    def _open_file(self, path: str) -> ByteFile:
        files = open_files(path, self.cache)
        if len(files) > 1:
            raise ConfigError(f"{strip_secrets(path)} matches {len(files)} files; data.path must be a single folder.")
        return files[0]

    def convert_rows(self, rows: list[dict[str, Any]], parts: Sequence[int]) -> list[dict[str, Any]]:
        for name in self._images:
            for row, part in zip(rows, parts, strict=True):
                place = f"{self.get_row_file(part).name}, byte {int(self.index['start'][part])} ({name})"
                row[name] = None if row[name] is None else _decode_stored_image(row[name], place, self.image_formats)
        return rows


def _read_json_entry(file: ByteFile, key: str, kind: type) -> Any:
    """Return the value of a key in a JSON file.

    Raises:
        ConfigError: the file is too large or not JSON, or the value is missing or of the wrong type.
    """
    if file.size > LARGEST:
        raise ConfigError(f"{file.name} has {file.size:,} bytes; the limit is {LARGEST:,}. Check the data path.")
    try:
        content = parse_strict_json(file.read(0, file.size), finite=False)
    except ValueError as error:
        raise ConfigError(f"{file.name}, byte 0: not valid JSON: {error}. Copy the file again.") from None
    if not isinstance(content, dict) or not isinstance(content.get(key), kind):
        raise ConfigError(f"{file.name}: missing or invalid key {key!r}. Save the data set again with save_to_disk.")
    return content[key]


def _decode_stored_image(stored: Mapping[str, Any], place: str, formats: Sequence[str]) -> Any:
    if stored["bytes"] is None:
        raise SampleError(
            f"{place}: the data set contains only the path of the image. Save the data set with its images."
        )
    return decode_content(stored["bytes"], "png", place, formats)
