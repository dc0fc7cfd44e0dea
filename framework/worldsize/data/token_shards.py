"""Token shards of ``worldsize prepare``: makes one of each piece of the input, and reads a folder's manifest.

The shard of a piece is the same, whoever makes it and however often. Imports no torch.
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
from worldsize.data.texts import Bad, Encoder, Span, TextFormat, Tokens, documents, dtype_of, spans
from worldsize.errors import ConfigError, WorldsizeError
from worldsize.strict_json import LARGEST, parse

_TOGETHER = 256  # documents that are encoded at once
_SHOWN = 3  # bad documents of a piece that are named


@final
@dataclass(frozen=True)
class Made:
    """A finished piece.

    Attributes:
        tokens: How many there are.
        documents: Documents that have tokens; others are left out.
        sha256: Digest of the file of tokens.
        documents_sha256: Digest of the file of documents.
        empty: Documents without tokens.
        skipped: Documents that could not be read.
        bad: The first of these, in words.
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
    """Parts of the input that make one shard; ``folder`` has the files of pieces."""

    number: int
    spans: Sequence[Span]
    folder: Path

    @property
    def tokens(self) -> Path:
        """File of its tokens."""
        return self.folder / f"tokens_{self.number:05d}.npy"

    @property
    def documents(self) -> Path:
        """File of where its documents begin."""
        return self.folder / f"documents_{self.number:05d}.npy"

    @property
    def facts(self) -> Path:
        """File that says what was made, written after the other two."""
        return self.folder / f"piece_{self.number:05d}.json"

    @property
    def size(self) -> int:
        """Bytes of its input."""
        return sum(span.size for span in self.spans)

    def made(self) -> Made | None:
        """Read what was made of it; None: it is not finished, or what says so is damaged."""
        try:
            return Made(**json.loads(self.facts.read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None


def pieces_of(paths: Iterable[Path], form: TextFormat, folder: Path, *, size: int) -> Iterator[ShardInput]:
    """Cut the input into pieces of about ``size`` bytes, which follow from it and from ``size`` alone."""
    taken: list[Span] = []
    number = filled = 0
    for span in (span for path in paths for span in spans(path, form, size=size)):
        taken.append(span)
        filled += span.size
        if filled >= size:
            yield ShardInput(number, tuple(taken), folder)
            taken, number, filled = [], number + 1, 0
    if taken:
        yield ShardInput(number, tuple(taken), folder)


def make(piece: ShardInput, encoder: Encoder, form: TextFormat, *, on_error: Literal["stop", "skip"]) -> Made:
    """Tokenise a piece and write its files, the one that says so last.

    Raises:
        WorldsizeError: a document cannot be read, and ``on_error`` is "stop".
    """
    bad: list[Bad] = []

    def texts() -> Iterator[str]:
        for span in piece.spans:
            for each in documents(span, form):
                if isinstance(each, str):
                    yield each
                elif on_error == "stop":
                    raise WorldsizeError(f"{each}. Correct it, or leave such documents out with --on-error skip.")
                else:
                    bad.append(each)

    encoded: list[Tokens] = []
    remaining = texts()
    while several := list(islice(remaining, _TOGETHER)):
        encoded += encoder.encode(several)
    filled = [each for each in encoded if len(each)]
    dtype = dtype_of(encoder.vocabulary)
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
    """Write an array atomically, and return the digest of its file."""
    with _replaced(path) as file:
        numpy.save(file, array)
    return sha256_of(path)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    with _replaced(path) as file:
        file.write((json.dumps(value, indent=2) + "\n").encode())


@contextmanager
def _replaced(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that takes the place of ``path`` once it is complete and on the disk."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


MANIFEST = "manifest.json"
_HEADER = 128  # bytes that numpy.save writes before numbers in one dimension
_BOUNDARY = 8  # bytes of the place in the tokens where a document begins
_UNFINISHED = "/.pieces/"


@final
@dataclass(frozen=True)
class Prepared:
    """The facts about shards that their manifest states.

    Attributes:
        vocabulary: The number of different tokens.
        tokenizer: Its name and its digest.
        sha256: A digest of all shards.
    """

    vocabulary: int
    tokenizer: Mapping[str, Any]
    sha256: str


def prepared(path: str, files: Sequence[ByteFile], cache: Cache) -> Prepared | None:
    """Read the manifest in the folder ``path``; return None if there is none.

    Args:
        path: a folder, here or at a URL.
        files: those of the data, some of which may be in the folder.
        cache: keeps what is read of URLs.

    Raises:
        ConfigError: the manifest is damaged, or of other shards, or the folder has not been finished.
    """
    if unfinished := next((file for file in files if _UNFINISHED in file.name), None):
        folder = unfinished.name.partition(_UNFINISHED)[0]
        raise ConfigError(f"the preparation of {folder} has not ended. Start the same worldsize prepare again.")
    manifests: list[ByteFile] = []
    with suppress(ConfigError):
        manifests = open_files(f"{path.rstrip('/')}/{MANIFEST}", cache)
    if len(manifests) != 1:  # a pattern may name several folders
        return None
    (manifest,) = manifests
    try:
        content = parse(manifest.read(0, min(manifest.size, LARGEST + 1)))
        tokenizer, listed = content["tokenizer"], listed_sizes(content)
        maker = {"name": tokenizer["name"], "sha256": tokenizer["sha256"]}
        facts = Prepared(int(tokenizer["vocabulary"]), maker, str(content["sha256"]))
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{manifest.name} is no manifest of worldsize prepare, or is damaged. Prepare the folder anew."
        ) from None
    folder = manifest.name.rpartition("/")[0]
    sizes = {PurePosixPath(file.name).name: file.size for file in files if file.name.rpartition("/")[0] == folder}
    for name in sorted(listed.keys() | {name for name in sizes if name.startswith(("tokens_", "documents_"))}):
        then, now = listed.get(name), sizes.get(name)
        if then != now:
            raise ConfigError(
                f"{folder}/{name}: {MANIFEST} beside it says {_bytes(then)}, and there are {_bytes(now)}. Bring the "
                "shards of one preparation, or prepare the folder anew."
            )
    return facts


def listed_sizes(content: Mapping[str, Any]) -> dict[str, int]:
    """Return the bytes of each file that a manifest lists, by its name.

    Raises:
        ValueError, KeyError, TypeError: it is no manifest.
    """
    sizes = {}
    for shard in content["shards"]:
        sizes[str(shard["file"])] = int(shard["bytes"])
        sizes[str(shard["documents_file"])] = _HEADER + _BOUNDARY * (int(shard["documents"]) + 1)
    return sizes


def _bytes(count: int | None) -> str:
    return "no bytes" if count is None else f"{count:,} bytes"
