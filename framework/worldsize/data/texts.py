"""Reads documents from text files, JSON lines and Parquet, a part of a file at a time, and tokenises them.

Tokens are bytes as they are, or come from a tokenizer of Hugging Face. Imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, final

import numpy
from numpy.typing import NDArray

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


BYTES = "bytes"
Tokens = NDArray[numpy.integer[Any]]


class Encoder(Protocol):
    """Turns texts into token numbers.

    Attributes:
        sha256: Digest of everything that decides the numbers.
        vocabulary: One more than the largest number.
    """

    sha256: str
    vocabulary: int

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the numbers of each text, in the smallest type that holds the vocabulary."""


def dtype_of(vocabulary: int) -> numpy.dtype[Any]:
    """Return the smallest unsigned type that holds the numbers below ``vocabulary``."""
    return numpy.min_scalar_type(max(0, vocabulary - 1))


@final
@dataclass(frozen=True)
class Tokenizer:
    """The tokenizer to use.

    Attributes:
        name: "bytes" (UTF-8, 256 numbers), a tokenizer.json, a folder of a transformers tokenizer, or its name on the
            hub.
        end: A token of the vocabulary that is put after each document; None: none is.
    """

    name: str
    end: str | None = None

    def encoder(self) -> Encoder:
        """Load it.

        Raises:
            ConfigError: it cannot be loaded, or has no token ``end``.
        """
        if self.name == BYTES:
            if self.end is not None:
                raise ConfigError("--tokenizer bytes has no token to put after a document. Leave --end out.")
            return _Bytes()
        return _HuggingFace(_loaded(self.name), self.end)


@final
class _Bytes:
    def __init__(self) -> None:
        self.sha256, self.vocabulary = hashlib.sha256(BYTES.encode()).hexdigest(), 256

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [numpy.frombuffer(text.encode(), dtype=numpy.uint8) for text in texts]


@final
class _HuggingFace:
    """A tokenizer without padding, truncation and the special tokens that it adds by itself."""

    def __init__(self, tokenizer: Any, end: str | None) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        numbers: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        if end is not None and end not in numbers:
            raise ConfigError(f"--end {end!r} is no token of the tokenizer{neighbours(end, numbers)}")
        self._tokenizer, self._end = tokenizer, [] if end is None else [numbers[end]]
        self.sha256 = hashlib.sha256(f"{tokenizer.to_str()}{self._end}".encode()).hexdigest()
        self.vocabulary = 1 + max(numbers.values())

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [numpy.array(each.ids + self._end, dtype=dtype_of(self.vocabulary)) for each in encoded]


def _loaded(name: str) -> Any:
    """Return a tokenizer of the library ``tokenizers``."""
    os.environ.setdefault(
        "TOKENIZERS_PARALLELISM", "false"
    )  # each process has a core, and threads do not survive forks
    file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        if file.is_file():
            from tokenizers import Tokenizer as Library

            return Library.from_file(str(file))
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
    except ImportError as error:
        raise ConfigError(f"--tokenizer {name} needs {error.name}: pip install transformers.") from None
    except Exception as error:  # tokenizers raises no other
        raise ConfigError(
            f"--tokenizer {name} cannot be loaded: {error}. Name bytes, a tokenizer.json, a folder that has one, or a "
            "name on the Hugging Face hub."
        ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"--tokenizer {name} has no tokenizer.json, and worldsize takes no other. Choose a fast one.")
    return tokenizer.backend_tokenizer
