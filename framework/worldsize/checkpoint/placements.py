"""Which ranks have which parts of a state, and which parts travel between them for each rank to get its own.

The description does not grow with the number of tensors times that of ranks. Most tensors are placed alike: each rank
has the same part (box) of all of them. So a rank sends, for each box, a table of its tensors: one byte a tensor,
compressed. Tensors in the same tables of all ranks are one placement, and the boxes of the ranks are listed once for
each placement.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, product
from typing import final

import torch

from worldsize.checkpoint.manifest_tree import Box
from worldsize.checkpoint.safetensors import overlap
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


@final
@dataclass(frozen=True)
class Transfer:
    """A part of a kept part, from the rank that sends it to one that needs it as a part of its own."""

    source: int
    target: int
    kept: Piece
    needed: Piece
    box: Box

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of what is sent."""
        return Piece(self.kept.name, self.box).sizes


def transfers_of(
    rank: int, kept: Sequence[TensorPlacement], needed: Sequence[TensorPlacement], names: Sequence[str]
) -> list[Transfer]:
    """Return what a rank sends and takes, in an order on which both ranks of each transfer agree.

    Args:
        rank: The rank; it takes from itself what it can.
        kept: Who keeps which parts.
        needed: Who needs which parts.
        names: Sorted names of all tensors.
    """
    needs = [holders.boxes_of(rank) for holders in needed]
    transfers = []
    for keepers, place, tensors in _both(kept, needed):
        own, holders = keepers.boxes_of(rank), needed[place].ranks
        others = [box for box in keepers.ranks if box not in own]
        for box, need in chain(product(own, holders), product(others, needs[place])):
            if (part := overlap(box, need)) is not None:
                for source, target, tensor in _routes(rank, keepers.ranks[box], holders[need], tensors):
                    name = names[tensor]
                    transfers.append(Transfer(source, target, Piece(name, box), Piece(name, need), part))
    return _ordered(transfers)


def handed_to(ranks: int, rank: int, kept: Sequence[TensorPlacement], names: Sequence[str]) -> list[Transfer]:
    """Return what ``rank`` sends or takes of what none of the first ``ranks`` keeps, if it is divided among these."""
    transfers = []
    for placement in kept:
        by_turn = _by_turn(placement.tensors, ranks)
        for number, (box, keepers) in enumerate(placement.ranks.items()):
            tensors: Sequence[int] = ()
            if rank == keepers[0] >= ranks:
                tensors = placement.tensors
            elif rank < ranks <= keepers[0]:
                tensors = by_turn.get((rank - number) % ranks, ())
            for tensor in tensors:
                piece = Piece(names[tensor], box)
                transfers.append(Transfer(keepers[0], (tensor + number) % ranks, piece, piece, box))
    return _ordered(transfers)


def _both(
    kept: Sequence[TensorPlacement], needed: Sequence[TensorPlacement]
) -> Iterator[tuple[TensorPlacement, int, list[int]]]:
    """Yield the tensors that have both one of the placements ``kept`` and one of those ``needed``, and its place."""
    place_of = {tensor: place for place, holders in enumerate(needed) for tensor in holders.tensors}
    for keepers in kept:
        by_place: dict[int, list[int]] = {}
        for tensor in keepers.tensors:
            by_place.setdefault(place_of[tensor], []).append(tensor)
        for place, tensors in by_place.items():
            yield keepers, place, tensors


def _routes(
    rank: int, sources: Sequence[int], targets: Sequence[int], tensors: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield from where to where a part of each of ``tensors`` travels, for those that ``rank`` sends or takes.

    The sources take turns: a target gets that of a tensor from the one at ``(target + tensor) % len(sources)``.
    """
    if rank in targets:
        for tensor in tensors:
            yield rank if rank in sources else sources[(rank + tensor) % len(sources)], rank, tensor
    if rank in sources:
        own = sources.index(rank)
        by_turn = _by_turn(sorted(set(targets).difference(sources)), len(sources))
        for tensor in tensors:
            for target in by_turn.get((own - tensor) % len(sources), ()):
                yield rank, target, tensor


def _by_turn(numbers: Sequence[int], turns: int) -> dict[int, list[int]]:
    """Return the numbers by their remainder."""
    by_turn: dict[int, list[int]] = {}
    for number in numbers:
        by_turn.setdefault(number % turns, []).append(number)
    return by_turn


def _ordered(transfers: Sequence[Transfer]) -> list[Transfer]:
    return sorted(transfers, key=lambda each: (each.kept.name, each.kept.box, each.needed.box))
