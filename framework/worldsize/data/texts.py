"""Read documents from text, JSON-lines and Parquet files in parts, and tokenize them.

Tokens are raw bytes or come from a Hugging Face tokenizer. This module does not import torch.
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

from worldsize.data.sources.table_parts import import_arrow
from worldsize.errors import ConfigError, WorldsizeError, neighbours

Documents = Literal["file", "line"]
_JSON_LINES = (".jsonl", ".ndjson", ".json")
_PARQUET = (".parquet", ".pq")


@final
@dataclass(frozen=True)
class TextFormat:
    """Location of documents within files.

    Attributes:
        field: Field with the text in JSON lines, or column in Parquet files.
        documents: Whether a document is a whole text file ("file") or each of its lines ("line").
    """

    field: str = "text"
    documents: Documents = "file"


@final
@dataclass(frozen=True)
class Span:
    """A byte range of an input file, or a range of its Parquet row groups.

    A line belongs to the span that it begins in.
    """

    path: Path
    begin: int
    end: int
    size: int  # in bytes


@final
@dataclass(frozen=True)
class Bad:
    """Location of an unreadable document, and the reason."""

    where: str
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


def input_files(inputs: Sequence[Path]) -> dict[str, Path]:
    """List the files in ``inputs``, keyed and sorted by their names in the manifest.

    Within folders, names that begin with a dot are ignored.

    Raises:
        ConfigError: an input does not exist, there are no files, or two files have the same name.
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
                raise ConfigError(
                    f"{named[name.as_posix()]} and {path} have the same name. Pass their common parent folder."
                )
            named[name.as_posix()] = path
    if not named:
        raise ConfigError(f"no files found in {', '.join(map(str, inputs))}. Pass text, JSON lines or Parquet files.")
    return dict(sorted(named.items()))


def split_into_spans(path: Path, form: TextFormat, *, size: int) -> Iterator[Span]:
    """Divide a file into spans: row groups, whole documents, or about ``size`` bytes each."""
    total = path.stat().st_size
    if path.suffix in _PARQUET:
        groups = _open_parquet(path).metadata
        for group in range(groups.num_row_groups):
            yield Span(path, group, group + 1, groups.row_group(group).total_byte_size)
    elif path.suffix not in _JSON_LINES and form.documents == "file":
        yield Span(path, 0, total, total)
    else:
        for begin in range(0, total, size):
            yield Span(path, begin, min(total, begin + size), min(total, begin + size) - begin)


def documents(span: Span, form: TextFormat) -> Iterator[str | Bad]:
    """Yield the documents of a span, with :class:`Bad` in place of unreadable ones."""
    if span.path.suffix in _PARQUET:
        yield from _read_column(span, form.field)
    elif span.path.suffix in _JSON_LINES:
        yield from _decode_lines(span, lambda line: _parse_field(line, form.field))
    elif form.documents == "line":
        yield from _decode_lines(span, lambda line: line.rstrip("\r\n"))
    else:
        yield _decode_text(span.path.read_bytes(), span.path, 0)


def _decode_lines(span: Span, read: Callable[[str], str | None]) -> Iterator[str | Bad]:
    """Yield ``read(line)``, or :class:`Bad` if unreadable, for nonblank lines in ``span``."""
    with span.path.open("rb") as file:
        file.seek(max(0, span.begin - 1))
        if span.begin:
            file.readline()  # skip the rest of the previous span's last line
        while (at := file.tell()) < span.end and (line := file.readline()):
            if not line.strip():
                continue
            text = _decode_text(line, span.path, at)
            if isinstance(text, Bad):
                yield text
                continue
            try:
                made = read(text)
            except ValueError as error:
                yield Bad(_format_position(span.path, at), str(error))
                continue
            if made is not None:
                yield made


def _decode_text(data: bytes, path: Path, at: int) -> str | Bad:
    try:
        return data.decode("utf-8-sig" if at == 0 else "utf-8")
    except UnicodeDecodeError as error:
        return Bad(_format_position(path, at + error.start), f"not valid UTF-8: {error.reason}")


def _format_position(path: Path, at: int) -> str:
    return f"{path}, byte {at:,}"


def _parse_field(line: str, field: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"the line is not a JSON object with a field {field!r}")
    if field not in row:
        raise ValueError(f"field {field!r} not found{neighbours(field, row)}")
    return _check_string(row[field], field)


def _check_string(value: Any, field: str) -> str:
    if value is None:
        raise ValueError(f"field {field!r} is null")
    if not isinstance(value, str):
        raise ValueError(f"field {field!r} must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"field {field!r} is not valid UTF-8: {error.reason}") from None
    return value


def _read_column(span: Span, column: str) -> Iterator[str | Bad]:
    file = _open_parquet(span.path)
    if column not in file.schema_arrow.names:
        yield Bad(str(span.path), f"column {column!r} not found{neighbours(column, file.schema_arrow.names)}")
        return
    row = sum(file.metadata.row_group(group).num_rows for group in range(span.begin))
    for batch in _read_row_groups(file, span, column):
        for value in batch.column(0).to_pylist():
            try:
                yield _check_string(value, column)
            except ValueError as error:
                yield Bad(f"{span.path}, row {row:,}", str(error))
            row += 1


def _read_row_groups(file: Any, span: Span, column: str) -> Iterator[Any]:
    try:
        yield from file.iter_batches(row_groups=range(span.begin, span.end), columns=[column])
    except (import_arrow().ArrowException, OSError) as error:
        raise WorldsizeError(
            f"{span.path}: failed to decode row group {span.begin}: {error}. Copy the file again."
        ) from None


def _open_parquet(path: Path) -> Any:
    try:
        return import_arrow().parquet.ParquetFile(path)
    except (import_arrow().ArrowException, OSError) as error:
        raise WorldsizeError(f"{path} is not a Parquet file: {error}") from None


BYTES = "bytes"
Tokens = NDArray[numpy.integer[Any]]


class Encoder(Protocol):
    """Interface of encoders from text to token IDs.

    Attributes:
        sha256: Digest of everything that determines the token IDs.
        vocabulary: Vocabulary size: the largest token ID plus 1.
    """

    sha256: str
    vocabulary: int

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Return the token IDs of each text, in the smallest sufficient unsigned dtype."""


def choose_token_dtype(vocabulary: int) -> numpy.dtype[Any]:
    """Return the smallest unsigned dtype for token IDs below ``vocabulary``."""
    return numpy.min_scalar_type(max(0, vocabulary - 1))


@final
@dataclass(frozen=True)
class Tokenizer:
    """Name of a tokenizer, and the token that ends a document.

    Attributes:
        name: "bytes" (UTF-8, 256 token IDs), a tokenizer.json, a folder with a transformers tokenizer, or its name on
            the Hugging Face hub.
        end: Token to append to each document, or None.
    """

    name: str
    end: str | None = None

    def load_encoder(self) -> Encoder:
        """Load the tokenizer.

        Raises:
            ConfigError: it cannot be loaded, or its vocabulary lacks ``end``.
        """
        if self.name == BYTES:
            if self.end is not None:
                raise ConfigError("--end is not supported with --tokenizer bytes. Remove --end.")
            return _Bytes()
        return _HuggingFace(_load_tokenizer(self.name), self.end)


@final
class _Bytes:
    def __init__(self) -> None:
        self.sha256, self.vocabulary = hashlib.sha256(BYTES.encode()).hexdigest(), 256

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        return [numpy.frombuffer(text.encode(), dtype=numpy.uint8) for text in texts]


@final
class _HuggingFace:
    """A Hugging Face tokenizer without padding, truncation and automatic special tokens."""

    def __init__(self, tokenizer: Any, end: str | None) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        numbers: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        if end is not None and end not in numbers:
            raise ConfigError(f"--end {end!r} is not a token of the tokenizer{neighbours(end, numbers)}")
        self._tokenizer, self._end = tokenizer, [] if end is None else [numbers[end]]
        self.sha256 = hashlib.sha256(f"{tokenizer.to_str()}{self._end}".encode()).hexdigest()
        self.vocabulary = 1 + max(numbers.values())

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [numpy.array(each.ids + self._end, dtype=choose_token_dtype(self.vocabulary)) for each in encoded]


def _load_tokenizer(name: str) -> Any:
    """Load a tokenizer of the library ``tokenizers`` from a file, a folder or the hub."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one core per process, and threads do not survive a fork
    file = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    try:
        if file.is_file():
            from tokenizers import Tokenizer as Library

            return Library.from_file(str(file))
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
    except ImportError as error:
        raise ConfigError(f"--tokenizer {name} requires {error.name}. Run pip install transformers.") from None
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(
            f"failed to load --tokenizer {name}: {error}. Pass bytes, a tokenizer.json, its folder, or the name of a "
            "model on the Hugging Face hub."
        ) from None
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(f"--tokenizer {name} requires a tokenizer.json, which is missing. Choose a fast tokenizer.")
    return tokenizer.backend_tokenizer
