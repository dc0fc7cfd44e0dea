"""Reads documents of tokens as ``worldsize prepare`` writes them, with the number of the document at each place.

A sample is a mapping of ``tokens`` and ``documents``, each int64 [length + 1]. The first document of a sample has the
number 0; places that hold nothing have -1. :func:`worldsize.data.packing.next_tokens` makes of a batch what a language
model is given.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from worldsize.data.packing import packed
from worldsize.data.sources.tokens import TokenFiles, Vector, file_name
from worldsize.data.storage.byte_files import ByteFile
from worldsize.data.storage.cache import Cache
from worldsize.data.storage.index import Scan, indexed
from worldsize.data.storage.open_files import open_files
from worldsize.errors import ConfigError

_TOGETHER = 1024  # documents that are packed together
Numbers = NDArray[Any]


@dataclass(frozen=True)
class _Shard:
    """Tokens, and where their documents begin and end: int64 [documents + 1]."""

    tokens: Vector
    bounds: Vector


@dataclass(frozen=True)
class DocumentFiles(TokenFiles):
    """Files ``tokens_*.npy``, each with a file ``documents_*.npy`` beside it.

    Raises:
        ConfigError: one has none, or that of another file.
    """

    @cached_property
    def shards(self) -> Sequence[_Shard]:
        """The files of tokens with those of their documents."""
        files = open_files(self.path, self.cache, endings=self.endings)
        bounds = {file.identity: file for file in files if file_name(file).startswith("documents_")}
        beside = {file.name: file for file in bounds.values()}
        if len(beside) < len(bounds):
            raise ConfigError("two URLs of the data differ in what may be secret alone. Name the files otherwise.")
        return [_shard(vector, beside, self.cache) for vector in self.tokens]

    def scanned(self, rows: Callable[[Vector, int], Iterator[Mapping[str, Numbers]]]) -> Scan:
        """Return a scan of files of tokens: ``rows`` of the boundaries of their documents and the longest piece."""
        bounds = {shard.tokens.file.identity: shard.bounds for shard in self.shards}
        return lambda file: rows(bounds[file.identity], self.length + 1)

    @cached_property
    def kind(self) -> str:
        """A name for what indices depend on beside the files of tokens."""
        bounds = [[shard.bounds.file.size, shard.bounds.file.stamp] for shard in self.shards]
        return f"samples of {self.length + 1} tokens, version 1, documents {bounds}"

    def fingerprint(self) -> Mapping[str, Any]:
        if self.prepared:
            return super().fingerprint()
        described = [[shard.tokens.file.digest(), shard.bounds.file.digest()] for shard in self.shards]
        size = sum(shard.tokens.file.size + shard.bounds.file.size for shard in self.shards)
        total = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        return {"size": size, "sha256": total, "files": len(described)}


def _shard(vector: Vector, bounds: Mapping[str, ByteFile], cache: Cache) -> _Shard:
    folder, _, own = vector.file.name.rpartition("/")
    name = f"{folder}/{own.replace('tokens_', 'documents_', 1)}"
    file = bounds.get(name)
    if file is None and own.startswith("tokens_"):
        with suppress(ConfigError):  # a pattern may name the tokens alone
            (file,) = open_files(name, cache)
    if file is None:
        raise ConfigError(
            f"{vector.file.name} has no file {name.rpartition('/')[2]} beside it, which says where documents end. "
            "Prepare the folder with worldsize prepare, or take data=tokens, which ignores documents."
        )
    shard = _Shard(vector, Vector(file, "int64"))
    last = int(shard.bounds.read(shard.bounds.length - 1, shard.bounds.length)[0])
    if last != vector.length:
        raise ConfigError(
            f"{name} is of another file: its documents end at token {last:,}, and {vector.file.name} has "
            f"{vector.length:,}. Prepare the folder anew."
        )
    return shard


@final
@dataclass(frozen=True)
class DocumentWindows(DocumentFiles):
    """Windows of tokens that follow each other: a document goes on in the next sample, and no place is empty."""

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(max(0, shard.tokens.length - 1) // self.length for shard in self.shards))

    def __len__(self) -> int:
        return self._ends[-1]

    @cached_property
    def _starts(self) -> Mapping[str, Numbers]:
        return indexed(f"starts: {self.kind}", self.files, self.cache, self.scanned(_starts_of))

    @cached_property
    def _documents_of(self) -> Numbers:
        """The row of the first document of each file, and the end of the last one: int64 [files + 1]."""
        return numpy.searchsorted(self._starts["file"], numpy.arange(len(self.files) + 1, dtype=numpy.uint32))

    def sample(self, index: int) -> Mapping[str, Tensor]:
        number = bisect.bisect_right(self._ends, index)
        start = (index - (self._ends[number - 1] if number else 0)) * self.length
        tokens = self.shards[number].tokens.read(start, start + self.length + 1).astype(numpy.int64)
        first, last = self._documents_of[number : number + 2]
        places = numpy.arange(start, start + self.length + 1)
        documents = numpy.searchsorted(self._starts["start"][first:last], places, side="right")
        return {"tokens": torch.from_numpy(tokens), "documents": torch.from_numpy(documents - documents[0])}


@final
@dataclass(frozen=True)
class PackedDocuments(DocumentFiles):
    """Documents that are cut only if they are longer than a sample.

    They are packed by best fit, decreasing, among each 1,024 that follow each other, and places are left empty.
    """

    @cached_property
    def _pieces(self) -> Mapping[str, Numbers]:
        return indexed(f"pieces: {self.kind}", self.files, self.cache, self.scanned(_pieces_of))

    @cached_property
    def _samples(self) -> Mapping[str, Numbers]:
        return indexed(f"bins: {self.kind}", self.files, self.cache, self.scanned(_samples_of))

    @cached_property
    def _first_pieces(self) -> Numbers:
        """The row of the first piece of each file: int64 [files]."""
        return numpy.searchsorted(self._pieces["file"], numpy.arange(len(self.files), dtype=numpy.uint32))

    def __len__(self) -> int:
        return len(self._samples["pieces"])

    def sample(self, index: int) -> Mapping[str, Tensor]:
        samples, pieces = self._samples, self._pieces
        file, count = int(samples["file"][index]), int(samples["pieces"][index])
        stop = int(self._first_pieces[file]) + int(samples["last"][index])
        tokens = numpy.zeros(self.length + 1, dtype=numpy.int64)
        documents = numpy.full(self.length + 1, -1, dtype=numpy.int64)
        place = 0
        for number, piece in enumerate(range(stop - count, stop)):
            start, length = int(pieces["start"][piece]), int(pieces["length"][piece])
            tokens[place : place + length] = self.shards[file].tokens.read(start, start + length)
            documents[place : place + length] = number
            place += length
        return {"tokens": torch.from_numpy(tokens), "documents": torch.from_numpy(documents)}


def _blocks(bounds: Vector) -> Iterator[Numbers]:
    """Yield the boundaries of 1,024 documents at a time: int64 [documents + 1]."""
    for first in range(0, bounds.length - 1, _TOGETHER):
        yield bounds.read(first, min(first + _TOGETHER, bounds.length - 1) + 1)


def _starts_of(bounds: Vector, _: int) -> Iterator[Mapping[str, Numbers]]:
    for block in _blocks(bounds):
        yield {"start": block[:-1]}


def _pieces_of(bounds: Vector, longest: int) -> Iterator[Mapping[str, Numbers]]:
    for block in _blocks(bounds):
        pieces, _ = packed(block, longest)
        yield {"start": pieces.starts, "length": pieces.lengths}


def _samples_of(bounds: Vector, longest: int) -> Iterator[Mapping[str, Numbers]]:
    before = 0
    for block in _blocks(bounds):
        counts = numpy.array(packed(block, longest)[1], dtype=numpy.int64)
        yield {"pieces": counts, "last": before + numpy.cumsum(counts)}
        before += int(counts.sum())
