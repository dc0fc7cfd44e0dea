"""Reads documents from text files, JSON lines and Parquet, a part of a file at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from worldsize.data.sources.table_parts import arrow
from worldsize.errors import ConfigError, WorldsizeError, neighbours

Documents = Literal["file", "line"]
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")


@final
@dataclass(frozen=True)
class TextFormat:
    """Says where the text of a document is.

    Attributes:
        field: Field of each JSON line, or column of a Parquet file.
        documents: What is one document of a text file: the file, or each of its lines.
    """

    field: str = "text"
    documents: Documents = "file"


@final
@dataclass(frozen=True)
class Span:
    """A part of an input file: bytes, or row groups of a Parquet file. A line belongs to the part it begins in."""

    path: Path
    begin: int
    end: int
    size: int  # bytes


@final
@dataclass(frozen=True)
class Bad:
    """A document that cannot be read: where it is, and why."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


def input_files(inputs: Sequence[Path]) -> dict[str, Path]:
    """List the files of ``inputs``, files or folders, by their names in the manifest, in the order of their names.

    Files in folders whose name begins with a dot are left out.

    Raises:
        ConfigError: an input is not there, there is no file, or two have one name.
    """
    named: dict[str, Path] = {}
    for given in inputs:
        if not given.exists():
            known = [path.name for path in given.parent.glob("[!.]*")]
            raise ConfigError(f"{given} does not exist{neighbours(given.name, known)}")
        below = [path for path in given.rglob("*") if path.is_file()] if given.is_dir() else [given]
        for path in below:
            name = path.relative_to(given if given.is_dir() else given.parent)
            if any(part.startswith(".") for part in name.parts) and given.is_dir():
                continue
            if name.as_posix() in named:
                raise ConfigError(f"{named[name.as_posix()]} and {path} have one name. Name the folder above both.")
            named[name.as_posix()] = path
    if not named:
        raise ConfigError(f"{', '.join(map(str, inputs))} has no files. Name text files, JSON lines or Parquet files.")
    return dict(sorted(named.items()))


def spans(path: Path, form: TextFormat, *, size: int) -> Iterator[Span]:
    """Cut a file into parts of about ``size`` bytes; a text file that is one document is one part."""
    total = path.stat().st_size
    if path.suffix in _PARQUET:
        groups = _parquet(path).metadata
        for group in range(groups.num_row_groups):
            yield Span(path, group, group + 1, groups.row_group(group).total_byte_size)
    elif path.suffix not in _JSON_LINES and form.documents == "file":
        yield Span(path, 0, total, total)
    else:
        for begin in range(0, total, size):
            yield Span(path, begin, min(total, begin + size), min(total, begin + size) - begin)


def documents(span: Span, form: TextFormat) -> Iterator[str | Bad]:
    """Yield the documents of a part of a file, and what cannot be read in their place."""
    if span.path.suffix in _PARQUET:
        yield from _column(span, form.field)
    elif span.path.suffix in _JSON_LINES:
        yield from _decoded(span, lambda line: _field(line, form.field))
    elif form.documents == "line":
        yield from _decoded(span, lambda line: line.rstrip("\r\n"))
    else:
        yield _text(span.path.read_bytes(), span.path, 0)


def _decoded(span: Span, read: Callable[[str], str | None]) -> Iterator[str | Bad]:
    """Yield what ``read`` makes of each line that begins in the part; blank lines are left out."""
    with span.path.open("rb") as file:
        file.seek(max(0, span.begin - 1))
        if span.begin:
            file.readline()  # the rest of a line that began before, or the end of one
        while (at := file.tell()) < span.end and (line := file.readline()):
            if not line.strip():
                continue
            text = _text(line, span.path, at)
            if isinstance(text, Bad):
                yield text
                continue
            try:
                made = read(text)
            except ValueError as error:
                yield Bad(_byte(span.path, at), str(error))
                continue
            if made is not None:
                yield made


def _text(data: bytes, path: Path, at: int) -> str | Bad:
    try:
        return data.decode("utf-8-sig" if at == 0 else "utf-8")
    except UnicodeDecodeError as error:
        return Bad(_byte(path, at + error.start), f"it is not UTF-8: {error.reason}")


def _byte(path: Path, at: int) -> str:
    return f"{path}, byte {at:,}"


def _field(line: str, field: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"the line is no JSON object, which would have a field {field!r}")
    if field not in row:
        raise ValueError(f"no field {field!r}{neighbours(field, row)}")
    return _string(row[field], field)


def _string(value: Any, field: str) -> str:
    if value is None:
        raise ValueError(f"field {field!r} is null")
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} is no text but {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"field {field!r} is not UTF-8: {error.reason}") from None
    return value


def _column(span: Span, column: str) -> Iterator[str | Bad]:
    file = _parquet(span.path)
    if column not in file.schema_arrow.names:
        yield Bad(str(span.path), f"no column {column!r}{neighbours(column, file.schema_arrow.names)}")
        return
    row = sum(file.metadata.row_group(group).num_rows for group in range(span.begin))
    for batch in _batches(file, span, column):
        for value in batch.column(0).to_pylist():
            try:
                yield _string(value, column)
            except ValueError as error:
                yield Bad(f"{span.path}, row {row:,}", str(error))
            row += 1


def _batches(file: Any, span: Span, column: str) -> Iterator[Any]:
    try:
        yield from file.iter_batches(row_groups=range(span.begin, span.end), columns=[column])
    except (arrow().ArrowException, OSError) as error:
        raise WorldsizeError(
            f"{span.path}, row group {span.begin}: it does not decode: {error}. Bring the file again."
        ) from None


def _parquet(path: Path) -> Any:
    try:
        return arrow().parquet.ParquetFile(path)
    except (arrow().ArrowException, OSError) as error:
        raise WorldsizeError(f"{path} is no Parquet file: {error}") from None
