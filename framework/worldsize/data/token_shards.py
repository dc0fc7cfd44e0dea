"""Token shards for ``worldsize prepare``: create them from pieces, and read manifests.

A piece yields the same shard in any process. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, final

import numpy

from worldsize.data.storage.byte_files import ByteFile
from worldsize.data.storage.cache import Cache
from worldsize.data.storage.listing import open_files
from worldsize.data.texts import Bad, Encoder, Span, TextFormat, Tokens, choose_token_dtype, documents, split_into_spans
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.strict_json import LARGEST, parse_strict_json

_TOGETHER = 256  # documents per call of the encoder
_SHOWN = 3  # maximum number of bad documents to record per piece


@final
@dataclass(frozen=True)
class Made:
    """Record of a finished piece.

    Attributes:
        tokens: Number of tokens.
        documents: Number of documents with tokens; empty ones are omitted.
        sha256: Digest of the token file.
        documents_sha256: Digest of the file with document boundaries.
        empty: Number of documents without tokens.
        skipped: Number of unreadable documents.
        bad: Descriptions of the first unreadable documents.
    """

    tokens: int
    documents: int
    sha256: str
    documents_sha256: str
    empty: int
    skipped: int
    bad: Sequence[str]


@final
@dataclass(frozen=True)
class ShardInput:
    """A piece: the input spans for one shard, and its files in the working folder ``folder``."""

    number: int
    spans: Sequence[Span]
    folder: Path

    @property
    def tokens(self) -> Path:
        """Path of the token file."""
        return self.folder / f"tokens_{self.number:05d}.npy"

    @property
    def documents(self) -> Path:
        """Path of the file with document boundaries."""
        return self.folder / f"documents_{self.number:05d}.npy"

    @property
    def facts(self) -> Path:
        """Path of the record, written after the two other files."""
        return self.folder / f"piece_{self.number:05d}.json"

    @property
    def size(self) -> int:
        """Input size in bytes."""
        return sum(span.size for span in self.spans)

    def read_record(self) -> Made | None:
        """Read the record; return None if the piece is unfinished or the record is damaged."""
        try:
            return Made(**json.loads(self.facts.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None


def split_into_pieces(paths: Iterable[Path], form: TextFormat, folder: Path, *, size: int) -> Iterator[ShardInput]:
    """Divide the input into pieces of about ``size`` bytes, deterministically."""
    taken: list[Span] = []
    number = filled = 0
    for span in (span for path in paths for span in split_into_spans(path, form, size=size)):
        taken.append(span)
        filled += span.size
        if filled >= size:
            yield ShardInput(number, tuple(taken), folder)
            taken, number, filled = [], number + 1, 0
    if taken:
        yield ShardInput(number, tuple(taken), folder)


def tokenize_piece(piece: ShardInput, encoder: Encoder, form: TextFormat, *, on_error: Literal["stop", "skip"]) -> Made:
    """Tokenize a piece and write its files, the record last.

    Raises:
        WorldsizeError: a document cannot be read and ``on_error`` is "stop".
    """
    bad: list[Bad] = []

    def read_texts() -> Iterator[str]:
        for span in piece.spans:
            for each in documents(span, form):
                if isinstance(each, str):
                    yield each
                elif on_error == "stop":
                    raise WorldsizeError(
                        f"{str(each).removesuffix('.')}. Fix the document, or skip unreadable documents with "
                        "--on-error skip."
                    )
                else:
                    bad.append(each)

    encoded: list[Tokens] = []
    remaining = read_texts()
    while several := list(islice(remaining, _TOGETHER)):
        encoded += encoder.encode(several)
    filled = [each for each in encoded if len(each)]
    dtype = choose_token_dtype(encoder.vocabulary)
    tokens = numpy.concatenate(filled) if filled else numpy.empty(0, dtype)
    starts = numpy.cumsum([0, *map(len, filled)], dtype=numpy.int64)
    made = Made(
        tokens=len(tokens),
        documents=len(filled),
        sha256=_write_array(piece.tokens, tokens),
        documents_sha256=_write_array(piece.documents, starts),
        empty=len(encoded) - len(filled),
        skipped=len(bad),
        bad=[str(each) for each in bad[:_SHOWN]],
    )
    write_json(piece.facts, asdict(made))
    return made


def _write_array(path: Path, array: numpy.ndarray[Any, Any]) -> str:
    """Write an array atomically; return the SHA-256 of its file."""
    with _replace_file(path) as file:
        numpy.save(file, array)
    return hash_file(path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    with _replace_file(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


@contextmanager
def _replace_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file; after the block, sync it to disk and rename it to ``path``."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


MANIFEST = "manifest.json"
_HEADER = 128  # bytes of the header from numpy.save for a one-dimensional array
_BOUNDARY = 8  # bytes per document boundary (int64)
_UNFINISHED = "/.pieces/"


@final
@dataclass(frozen=True)
class Prepared:
    """Properties of token shards from their manifest.

    Attributes:
        vocabulary: Vocabulary size.
        tokenizer: Name and digest of the tokenizer.
        sha256: Digest of all shards.
    """

    vocabulary: int
    tokenizer: Mapping[str, Any]
    sha256: str


def read_prepared_manifest(path: str, files: Sequence[ByteFile], cache: Cache) -> Prepared | None:
    """Read the manifest in the folder ``path``; return None if there is none.

    Args:
        path: a local folder or a URL.
        files: the data files; those in the folder are compared with the manifest.
        cache: stores data read from URLs.

    Raises:
        ConfigError: the manifest is damaged or lists different shards, or the preparation is unfinished.
    """
    if unfinished := next((file for file in files if _UNFINISHED in file.name), None):
        folder = unfinished.name.partition(_UNFINISHED)[0]
        raise ConfigError(f"the preparation of {folder} is incomplete. Run the same worldsize prepare command again.")
    manifests: list[ByteFile] = []
    with suppress(ConfigError):
        manifests = open_files(f"{path.rstrip('/')}/{MANIFEST}", cache)
    if len(manifests) != 1:  # a pattern may match several folders
        return None
    (manifest,) = manifests
    try:
        content = parse_strict_json(manifest.read(0, min(manifest.size, LARGEST + 1)))
        tokenizer, listed = content["tokenizer"], read_shard_sizes(content)
        maker = {"name": tokenizer["name"], "sha256": tokenizer["sha256"]}
        facts = Prepared(int(tokenizer["vocabulary"]), maker, str(content["sha256"]))
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{manifest.name} is damaged or not a manifest of worldsize prepare. Prepare the folder again."
        ) from None
    folder = manifest.name.rpartition("/")[0]
    sizes = {PurePosixPath(file.name).name: file.size for file in files if file.name.rpartition("/")[0] == folder}
    for name in sorted(listed.keys() | {name for name in sizes if name.startswith(("tokens_", "documents_"))}):
        then, now = listed.get(name), sizes.get(name)
        if then != now:
            raise ConfigError(
                f"{folder}/{name}: expected {_format_bytes(then)} according to {MANIFEST}, found "
                f"{_format_bytes(now)}. Use the shards of a single preparation, or prepare the folder again."
            )
    return facts


def read_shard_sizes(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the size in bytes of each file in a manifest, keyed by name.

    Raises:
        ValueError, KeyError, TypeError: ``content`` is not a manifest.
    """
    sizes = {}
    for shard in content["shards"]:
        sizes[str(shard["file"])] = int(shard["bytes"])
        sizes[str(shard["documents_file"])] = _HEADER + _BOUNDARY * (int(shard["documents"]) + 1)
    return sizes


def _format_bytes(count: int | None) -> str:
    return "no file" if count is None else f"{count:,} bytes"
