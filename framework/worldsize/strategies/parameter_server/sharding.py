"""The assignment of parameters to servers: split into pieces, balanced by bytes, and grouped in buckets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor

from worldsize.strategies.parameter_server.gradient_codecs import GradientCodec
from worldsize.strategies.parameter_server.row_tables import RowRule

_SMALLEST = 1 << 16  # bytes; smaller parameters are not split


@final
@dataclass(frozen=True)
class Piece:
    """Rows ``first`` to ``first + shape[0]`` of the parameter ``name``, or all of it if it has no dimension."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def of(self, tensor: Tensor) -> Tensor:
        """Return this piece of a full ``tensor``, a view of its rows; scalars, such as step counts, are not split."""
        return tensor[self.first : self.first + self.shape[0]] if self.shape and tensor.ndim else tensor


@final
@dataclass(frozen=True)
class Bucket:
    """Pieces of one dtype that are sent as one frame, flattened and in this order."""

    pieces: tuple[Piece, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    @property
    def numel(self) -> int:
        return sum(piece.numel for piece in self.pieces)

    def views(self, flat_n: Tensor) -> list[Tensor]:
        """Return the pieces inside a tensor (n,), as views in their own shapes."""
        ends = accumulate(piece.numel for piece in self.pieces)
        return [flat_n[end - p.numel : end].view(p.shape) for end, p in zip(ends, self.pieces, strict=True)]


ShardLayout = tuple[Bucket, ...]
BucketKey = tuple[int, int]  # the server, and the bucket's index there


@final
@dataclass(frozen=True)
class ShardingPlan:
    """The plan on which servers and workers agree.

    Attributes:
        shards: The buckets of each shard.
        rows: How rows of tables are assigned to servers and kept.
        codec: Wire format of pushed gradients; None: uncompressed.
    """

    shards: Sequence[ShardLayout]
    rows: RowRule
    codec: GradientCodec | None = None


def plan_shards(parameters: Mapping[str, Tensor], count: int, *, bucket_bytes: int, cut: bool) -> list[ShardLayout]:
    """Plan the buckets of each of ``count`` servers, in the order in which a backward pass fills them.

    Args:
        parameters: Parameters of any shapes, by name.
        count: Number of servers.
        bucket_bytes: Size of a bucket in bytes.
        cut: Whether large parameters are split along their first dimension, which is valid for elementwise optimizers.
    """
    total = sum(tensor.nbytes for tensor in parameters.values())
    order = {name: place for place, name in enumerate(reversed(list(parameters)))}
    largest = max(_SMALLEST, total // (4 * count)) if cut and count > 1 else total
    pieces = [piece for name, tensor in parameters.items() for piece in _pieces(name, tensor, largest, count)]
    loads, owned = [0] * count, [list[Piece]() for _ in range(count)]
    for piece in sorted(pieces, key=lambda piece: (-piece.nbytes, order[piece.name], piece.first)):
        least = loads.index(min(loads))
        loads[least] += piece.nbytes
        owned[least].append(piece)
    arrival = [sorted(mine, key=lambda piece: (order[piece.name], piece.first)) for mine in owned]
    return [tuple(Bucket(tuple(group)) for group in _bucketed(mine, bucket_bytes)) for mine in arrival]


def _pieces(name: str, tensor: Tensor, largest: int, count: int) -> Iterator[Piece]:
    shape = tuple(tensor.shape)
    parts = min(count, shape[0]) if shape and tensor.nbytes > largest else 1
    ends = [shape[0] * part // parts for part in range(parts + 1)] if shape else []
    if parts == 1:
        yield Piece(name, tensor.dtype, shape)
        return
    for first, end in pairwise(ends):
        yield Piece(name, tensor.dtype, (end - first, *shape[1:]), first)


def _bucketed(pieces: Sequence[Piece], limit: int) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    for piece in pieces:
        full = sum(member.nbytes for member in group) + piece.nbytes > limit
        if group and (full or piece.dtype != group[0].dtype):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group
