"""Tokenized documents from ``worldsize prepare``, cut into windows or packed into samples.

A sample is a mapping with ``tokens`` and ``documents`` (the document index of each token), both int64 [length + 1].
Documents are counted from 0 within a sample, and padding has index -1. :func:`next_tokens` converts a batch to inputs
and targets for a language model, within documents.
"""

from __future__ import annotations

import bisect
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, final

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from worldsize.data.source import IndexedSource, LookedUpLengths
from worldsize.data.sources.tokens import TokenFiles, Vector, Windows, file_name
from worldsize.data.storage.byte_files import ByteFile, compute_digests
from worldsize.data.storage.cache import Cache
from worldsize.data.storage.index import Scan
from worldsize.data.storage.listing import open_files
from worldsize.errors import ConfigError

_TOGETHER = 1024  # documents per group that is packed together
Numbers = NDArray[Any]


@dataclass(frozen=True)
class _Shard:
    """A token file and its document boundaries, int64 [documents + 1]."""

    tokens: Vector
    bounds: Vector


@dataclass(frozen=True)
class DocumentFiles(TokenFiles, IndexedSource):
    """Base class for ``tokens_*.npy`` with boundaries in ``documents_*.npy`` in the same folder.

    Raises:
        ConfigError: a boundaries file is missing, or does not match its token file.
    """

    @cached_property
    def shards(self) -> Sequence[_Shard]:
        """The token files with their document boundaries."""
        bounds = {file.identity: file for file in self.listed if file_name(file).startswith("documents_")}
        beside = {file.name: file for file in bounds.values()}
        if len(beside) < len(bounds):
            raise ConfigError("two data URLs differ only in their credentials or query. Rename the files.")
        return [_open_shard(vector, beside, self.cache) for vector in self.tokens]

    @cached_property
    def bounds(self) -> Mapping[str, Vector]:
        """Document boundaries, keyed by the identity of the token file."""
        return {shard.tokens.file.identity: shard.bounds for shard in self.shards}

    @property
    def kind(self) -> str:
        return f"documents {[[vector.file.size, vector.file.stamp] for vector in self.bounds.values()]}"

    def fingerprint(self) -> Mapping[str, Any]:
        shards = self.shards  # raises if boundaries do not match the tokens
        if self.prepared:
            return super().fingerprint()
        for shard in shards:
            for _ in _read_blocks(shard.bounds):  # without a manifest, checks all boundaries before the run starts
                pass
        tokens = compute_digests([shard.tokens.file for shard in shards])
        described = list(zip(tokens, compute_digests([shard.bounds.file for shard in shards]), strict=True))
        size = sum(shard.tokens.file.size + shard.bounds.file.size for shard in shards)
        total = hashlib.sha256(json.dumps(described).encode()).hexdigest()
        return {"size": size, "sha256": total, "files": len(described)}


def _open_shard(vector: Vector, bounds: Mapping[str, ByteFile], cache: Cache) -> _Shard:
    folder, _, own = vector.file.name.rpartition("/")
    name = f"{folder}/{own.replace('tokens_', 'documents_', 1)}"
    file = bounds.get(name)
    if file is None and own.startswith("tokens_"):
        with suppress(ConfigError):  # the path may be a pattern that matches only the token files
            (file,) = open_files(name, cache)
    if file is None:
        raise ConfigError(
            f"document boundaries {name.rpartition('/')[2]} not found next to {vector.file.name}. Prepare the folder "
            "with worldsize prepare, or use data=tokens, which ignores documents."
        )
    shard = _Shard(vector, Vector(file, "int64"))
    if shard.bounds.length == 0 or (first := int(shard.bounds.read(0, 1)[0])) != 0:
        begins = "the file is empty" if shard.bounds.length == 0 else f"the first document begins at token {first:,}"
        raise ConfigError(f"{name} does not contain valid document boundaries: {begins}. Prepare the folder again.")
    last = int(shard.bounds.read(shard.bounds.length - 1, shard.bounds.length)[0])
    if last != vector.length:
        raise ConfigError(
            f"{name} does not match {vector.file.name}: the documents end at token {last:,}, the file at "
            f"{vector.length:,}. Prepare the folder again."
        )
    return shard


@final
@dataclass(frozen=True)
class DocumentWindows(DocumentFiles):
    """Windows of consecutive tokens without padding; documents may continue in the next sample."""

    @cached_property
    def _windows(self) -> Windows:
        return Windows([shard.tokens for shard in self.shards], self.length)

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def kind(self) -> str:
        return f"starts-2 {super().kind}"

    def create_scanner(self) -> Scan:
        """Return a function that indexes the start of each document in a file."""

        def scan_documents(file: ByteFile) -> Iterator[Mapping[str, Numbers]]:
            for block in _read_blocks(self.bounds[file.identity]):
                yield {"start": block[:-1]}

        return scan_documents

    @cached_property
    def _documents_of(self) -> Numbers:
        """Index row of each file's first document, and the number of rows: int64 [files + 1]."""
        return numpy.searchsorted(self.index["file"], numpy.arange(len(self.files) + 1, dtype=numpy.uint32))

    def sample(self, index: int) -> Mapping[str, Tensor]:
        file, start, tokens = self._windows[index]
        first, last = self._documents_of[file : file + 2]
        documents = numpy.searchsorted(
            self.index["start"][first:last], numpy.arange(start, start + len(tokens)), side="right"
        )
        return {"tokens": torch.from_numpy(tokens), "documents": torch.from_numpy(documents - documents[0])}


@final
@dataclass(frozen=True)
class PackedDocuments(DocumentFiles):
    """Packed documents that are only split if they are longer than a sample.

    Each group of 1,024 consecutive documents is packed by best-fit decreasing; the rest of a sample is padding.
    """

    @property
    def kind(self) -> str:
        return f"packed-2 {self.length + 1} tokens {super().kind}"

    def create_scanner(self) -> Scan:
        """Return a function that indexes piece counts (cumulative), starts and lengths."""
        before = 0

        def scan_samples(file: ByteFile) -> Iterator[Mapping[str, Numbers]]:
            nonlocal before
            for block in _read_blocks(self.bounds[file.identity]):
                pieces, counts = pack_documents(block, self.length + 1)
                stops = before + numpy.cumsum(counts, dtype=numpy.int64)
                yield {"stop": stops, "start": pieces.starts, "length": pieces.lengths}
                before += len(pieces.starts)

        return scan_samples

    def __len__(self) -> int:
        return len(self.index["stop"])

    @property
    def lengths(self) -> LookedUpLengths:
        """Number of tokens in each sample, without padding."""
        return LookedUpLengths(self._count_tokens)

    def _count_tokens(self, indices: Numbers) -> Numbers:
        stops, lengths = self.index["stop"], self.index["length"]
        firsts = numpy.where(indices > 0, stops[indices - 1], 0)
        return numpy.array([lengths[first:stop].sum() for first, stop in zip(firsts, stops[indices], strict=True)])

    def sample(self, index: int) -> Mapping[str, Tensor]:
        stops = self.index["stop"]
        shard = self.shards[int(self.index["file"][index])]
        tokens = numpy.zeros(self.length + 1, dtype=numpy.int64)
        documents = numpy.full(self.length + 1, -1, dtype=numpy.int64)
        place = 0
        for number, piece in enumerate(range(int(stops[index - 1]) if index else 0, int(stops[index]))):
            start, length = int(self.index["start"][piece]), int(self.index["length"][piece])
            tokens[place : place + length] = shard.tokens.read(start, start + length)
            documents[place : place + length] = number
            place += length
        return {"tokens": torch.from_numpy(tokens), "documents": torch.from_numpy(documents)}


def _read_blocks(bounds: Vector) -> Iterator[Numbers]:
    """Yield the boundaries of groups of up to 1,024 documents: int64 [documents + 1].

    Raises:
        ConfigError: a document ends before it begins.
    """
    for first in range(0, bounds.length - 1, _TOGETHER):
        block = bounds.read(first, min(first + _TOGETHER, bounds.length - 1) + 1).astype(numpy.int64, copy=False)
        if len(descents := numpy.flatnonzero(numpy.diff(block) < 0)):
            here = int(descents[0])
            raise ConfigError(
                f"{bounds.file.name}: document {first + here:,} begins at token {block[here]:,} and ends at "
                f"{block[here + 1]:,}. Prepare the folder again."
            )
        yield block


IGNORED = -100
"""Target that the loss ignores: the default ``ignore_index`` of torch's ``cross_entropy``."""

Int64Array = NDArray[numpy.int64]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack pieces into bins: longest first, each into the fullest bin with enough room.

    This is best-fit decreasing (Johnson, Demers, Ullman, Garey and Graham, SIAM Journal on Computing 3, 1974), which
    needs at most 11/9 of the optimal number of bins plus 4.

    Args:
        lengths: lengths of the pieces, each at most ``capacity``.
        capacity: maximum total length per bin.

    Returns:
        The indices of the pieces in each bin.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, bin index), ascending
    for piece in sorted(range(len(lengths)), key=lambda piece: (-lengths[piece], piece)):
        place = bisect.bisect_left(rooms, (lengths[piece], -1))
        if place < len(rooms):
            room, chosen = rooms.pop(place)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(piece)
        bisect.insort(rooms, (room - lengths[piece], chosen))
    return bins


class Pieces(NamedTuple):
    """Pieces of documents: start and length in tokens, int64 [pieces] each."""

    starts: Int64Array
    lengths: Int64Array


def split_documents(bounds: Int64Array, longest: int) -> Pieces:
    """Split documents into pieces of at most ``longest`` tokens that overlap by one token.

    Each token of a document except its first is therefore predicted in exactly one piece.

    Args:
        bounds: document boundaries (starts and the last end), int64 [documents + 1].
        longest: maximum length of a piece in tokens, at least 2.
    """
    lengths = numpy.diff(bounds)
    counts = numpy.maximum(1, -(-(lengths - 1) // (longest - 1)))
    counts[lengths == 0] = 0
    documents = numpy.repeat(numpy.arange(len(lengths)), counts)
    numbers = numpy.arange(len(documents)) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
    starts = bounds[documents] + numbers * (longest - 1)
    return Pieces(starts, numpy.minimum(longest, bounds[documents + 1] - starts))


def next_tokens(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Convert a batch of samples to inputs, targets and positions for a language model.

    Args:
        batch: ``tokens`` and ``documents``, each int64 [batch, length + 1].

    Returns:
        Inputs, targets and positions, each int64 [batch, length]. Targets in a different document than their input are
        ``IGNORED``. Positions restart at 0 with each document. A transformers model that receives them as
        ``position_ids``, without a mask, only attends within documents.
    """
    tokens, documents = batch["tokens"], batch["documents"]
    inputs, within = tokens[:, :-1], documents[:, :-1]
    counted = (within == documents[:, 1:]) & (within >= 0)
    places = torch.arange(inputs.shape[1], device=tokens.device).expand_as(inputs)
    begins = torch.ones_like(within, dtype=torch.bool)
    begins[:, 1:] = within[:, 1:] != within[:, :-1]
    first = torch.where(begins, places, 0).cummax(dim=1).values
    return inputs, tokens[:, 1:].masked_fill(~counted, IGNORED), places - first


def pack_documents(bounds: Int64Array, longest: int) -> tuple[Pieces, list[int]]:
    """Pack documents into samples of at most ``longest`` tokens.

    Args:
        bounds: document boundaries (starts and the last end), int64 [documents + 1].

    Returns:
        The pieces, grouped by sample, and the number of pieces per sample.
    """
    pieces = split_documents(bounds, longest)
    bins = best_fit(pieces.lengths.tolist(), longest)
    order = numpy.array([piece for chosen in bins for piece in sorted(chosen)], dtype=numpy.int64)
    return Pieces(pieces.starts[order], pieces.lengths[order]), [len(chosen) for chosen in bins]
