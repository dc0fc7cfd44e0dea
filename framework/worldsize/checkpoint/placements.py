"""Says which ranks have which parts of a state, in a size that does not grow with its tensors times the ranks.

Most tensors are placed alike: each rank has the same part (box) of all of them. So a rank tells, for each box, of which
tensors it has that part: a table of one byte a tensor, compressed. Tensors that are in the same tables of all ranks are
one placement, and who has which box is listed once for each placement.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import final

import torch

from worldsize.checkpoint.validation import Box
from worldsize.errors import CheckpointError


@final
@dataclass(frozen=True, order=True)
class Piece:
    """A part of a tensor: its name, and the (begin, end) of the part in each dimension."""

    name: str
    box: Box

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(end - begin for begin, end in self.box)

    @property
    def elements(self) -> int:
        """Number of elements of the part."""
        return elements_in(self.box)


def elements_in(box: Box) -> int:
    """Return the number of elements of a part."""
    return math.prod(end - begin for begin, end in box)


@final
@dataclass(frozen=True)
class Inventory:
    """Lists the parts that one rank has of a state: boxes, each with a packed table of the tensors.

    Attributes:
        tables: A box may be in several.
        state: Checksum of the names and dtypes of all tensors of the state, by which tables of two ranks are compared.
    """

    tables: Sequence[tuple[Box, bytes]]
    state: int


@final
@dataclass
class TensorPlacement:
    """Tensors, by their places among the sorted names of the state, of which the same ranks have the same parts."""

    tensors: list[int] = field(default_factory=list)
    ranks: dict[Box, list[int]] = field(default_factory=dict)

    def boxes_of(self, rank: int) -> list[Box]:
        """Return the parts of each of the tensors that a rank has."""
        return [box for box, ranks in self.ranks.items() if rank in ranks]


def inventory_of(pieces: Iterable[Piece], dtypes: Mapping[str, torch.dtype]) -> Inventory:
    """Return what a rank tells of the parts that it has; ``dtypes``: those of all tensors of the state, by name."""
    names = sorted(dtypes)
    places = {name: place for place, name in enumerate(names)}
    tables: dict[tuple[Box, str], bytearray] = {}
    for piece in pieces:
        # one for each kind, so that few tables differ: zero's weights are whole everywhere, their moments in one place
        kind, _, _ = piece.name.partition("/")
        tables.setdefault((piece.box, kind), bytearray(len(names)))[places[piece.name]] = 1
    state = zlib.crc32("\n".join(f"{name} {dtypes[name]}" for name in names).encode())
    return Inventory([(box, zlib.compress(table)) for (box, _), table in tables.items()], state)


def placements_of(inventories: Sequence[Inventory | None]) -> list[TensorPlacement]:
    """Return which ranks have what, given what each of them tells (None: it has nothing); all ranks get the same.

    Raises:
        CheckpointError: they are inventories of different states.
    """
    told = [(rank, each) for rank, each in enumerate(inventories) if each is not None]
    check_same([each for _, each in told])
    tables = dict.fromkeys(table for _, each in told for _, table in each.tables)
    within = _placements_within(tables)
    for rank, inventory in told:
        for box, table in inventory.tables:
            for placement in within[table]:
                placement.ranks.setdefault(box, []).append(rank)
    return list({id(each): each for placements in within.values() for each in placements}.values())


def check_same(inventories: Collection[Inventory]) -> None:
    """Check that all are of states whose tensors have the same names and dtypes.

    Raises:
        CheckpointError: they are not.
    """
    if len({each.state for each in inventories}) > 1:
        raise CheckpointError(
            "what the ranks hold of the state, or have kept of it, differs in the names or dtypes of tensors. Let the "
            "model have all parameters and buffers, on all ranks, when it is made."
        )


def _placements_within(tables: Iterable[bytes]) -> dict[bytes, list[TensorPlacement]]:
    """Return the placements in each table; the tensors of one placement are in the same tables."""
    tables_of: dict[int, list[bytes]] = {}
    for table in tables:
        flags = zlib.decompress(table)
        for place in compress(range(len(flags)), flags):
            tables_of.setdefault(place, []).append(table)
    alike: dict[tuple[bytes, ...], TensorPlacement] = {}
    for place in sorted(tables_of):
        alike.setdefault(tuple(tables_of[place]), TensorPlacement()).tensors.append(place)
    within: dict[bytes, list[TensorPlacement]] = {}
    for key, placement in alike.items():
        for table in key:
            within.setdefault(table, []).append(placement)
    return within
