"""The distribution of a state's shards over ranks, and the transfers that change it.

The description is much smaller than (number of tensors) × (number of ranks), since a rank usually holds the same range
of indices (box) of most tensors. A rank therefore sends one table per box and part of the state: one byte per tensor,
compressed. Tensors in the same tables on all ranks form one placement, and the ranks' boxes are listed once per
placement.
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
from worldsize.checkpoint.safetensors import intersect_boxes
from worldsize.errors import CheckpointError


@final
@dataclass(frozen=True, order=True)
class Piece:
    """A shard of a tensor: the tensor's name, and the shard's (begin, end) in each dimension."""

    name: str
    box: Box

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the shard."""
        return tuple(end - begin for begin, end in self.box)

    @property
    def elements(self) -> int:
        """Number of elements in the shard."""
        return elements_in(self.box)


def elements_in(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(end - begin for begin, end in box)


@final
@dataclass(frozen=True)
class Inventory:
    """The shards of a state that one rank has, as boxes with compressed tables of tensors.

    Attributes:
        tables: Pairs of a box and a table; a box may occur several times.
        state: Checksum of the names and dtypes of all tensors of the state, to check that ranks' tables are comparable.
    """

    tables: Sequence[tuple[Box, bytes]]
    state: int


@final
@dataclass
class TensorPlacement:
    """Tensors (indices into the sorted names) that have the same boxes on the same ranks."""

    tensors: list[int] = field(default_factory=list)
    ranks: dict[Box, list[int]] = field(default_factory=dict)

    def list_boxes(self, rank: int) -> list[Box]:
        """Return the boxes of these tensors on ``rank``."""
        return [box for box, ranks in self.ranks.items() if rank in ranks]


def build_inventory(pieces: Iterable[Piece], dtypes: Mapping[str, torch.dtype]) -> Inventory:
    """Return the inventory of a rank's shards; ``dtypes`` has all tensors of the state by name."""
    names = sorted(dtypes)
    places = {name: place for place, name in enumerate(names)}
    tables: dict[tuple[Box, str], bytearray] = {}
    for piece in pieces:
        # a table per part of the state, so that more ranks' tables are equal: ZeRO shards the optimizer, not the model
        kind, _, _ = piece.name.partition("/")
        tables.setdefault((piece.box, kind), bytearray(len(names)))[places[piece.name]] = 1
    state = zlib.crc32("\n".join(f"{name} {dtypes[name]}" for name in names).encode())
    return Inventory([(box, zlib.compress(table)) for (box, _), table in tables.items()], state)


def build_placements(inventories: Sequence[Inventory | None]) -> list[TensorPlacement]:
    """Return the distribution of shards, given the ranks' inventories (None: empty).

    Raises:
        CheckpointError: the inventories belong to different states.
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
    """Check that all inventories belong to states with the same tensor names and dtypes.

    Raises:
        CheckpointError: the names or dtypes differ.
    """
    if len({each.state for each in inventories}) > 1:
        raise CheckpointError(
            "tensor names or dtypes differ between the states of the ranks. Create all parameters and buffers on all "
            "ranks when building the model."
        )


def _placements_within(tables: Iterable[bytes]) -> dict[bytes, list[TensorPlacement]]:
    """Return the placements in each table; all tensors of a placement are in the same tables."""
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
    """Transfer of ``box``, from a rank that stores ``kept`` to one that needs ``needed``."""

    source: int
    target: int
    kept: Piece
    needed: Piece
    box: Box

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of the sent tensor."""
        return Piece(self.kept.name, self.box).sizes


def plan_transfers(
    rank: int, kept: Sequence[TensorPlacement], needed: Sequence[TensorPlacement], names: Sequence[str]
) -> list[Transfer]:
    """Return a rank's transfers, in the same order on both ranks of each transfer.

    Args:
        rank: The rank; it copies from itself if possible.
        kept: Ranks that store each shard.
        needed: Ranks that need each shard.
        names: Sorted names of all tensors.
    """
    needs = [holders.list_boxes(rank) for holders in needed]
    transfers = []
    for keepers, place, tensors in _match_placements(kept, needed):
        own, holders = keepers.list_boxes(rank), needed[place].ranks
        others = [box for box in keepers.ranks if box not in own]
        for box, need in chain(product(own, holders), product(others, needs[place])):
            if (part := intersect_boxes(box, need)) is not None:
                for source, target, tensor in _plan_routes(rank, keepers.ranks[box], holders[need], tensors):
                    name = names[tensor]
                    transfers.append(Transfer(source, target, Piece(name, box), Piece(name, need), part))
    return _sort_transfers(transfers)


def plan_handover(ranks: int, rank: int, kept: Sequence[TensorPlacement], names: Sequence[str]) -> list[Transfer]:
    """Return ``rank``'s transfers in a handover of shards to the first ``ranks`` ranks.

    Only shards that none of the first ``ranks`` ranks stores are transferred.
    """
    transfers = []
    for placement in kept:
        by_turn = _group_by_turn(placement.tensors, ranks)
        for number, (box, keepers) in enumerate(placement.ranks.items()):
            tensors: Sequence[int] = ()
            if rank == keepers[0] >= ranks:
                tensors = placement.tensors
            elif rank < ranks <= keepers[0]:
                tensors = by_turn.get((rank - number) % ranks, ())
            for tensor in tensors:
                piece = Piece(names[tensor], box)
                transfers.append(Transfer(keepers[0], (tensor + number) % ranks, piece, piece, box))
    return _sort_transfers(transfers)


def _match_placements(
    kept: Sequence[TensorPlacement], needed: Sequence[TensorPlacement]
) -> Iterator[tuple[TensorPlacement, int, list[int]]]:
    """Yield (placement in ``kept``, index in ``needed``, common tensors) where there are any."""
    place_of = {tensor: place for place, holders in enumerate(needed) for tensor in holders.tensors}
    for keepers in kept:
        by_place: dict[int, list[int]] = {}
        for tensor in keepers.tensors:
            by_place.setdefault(place_of[tensor], []).append(tensor)
        for place, tensors in by_place.items():
            yield keepers, place, tensors


def _plan_routes(
    rank: int, sources: Sequence[int], targets: Sequence[int], tensors: Sequence[int]
) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, tensor) for each of ``tensors`` that ``rank`` sends or receives.

    A target copies from itself if possible. Otherwise, to balance the load, it receives a tensor from the source at
    index ``(target + tensor) % len(sources)``.
    """
    if rank in targets:
        for tensor in tensors:
            yield rank if rank in sources else sources[(rank + tensor) % len(sources)], rank, tensor
    if rank in sources:
        own = sources.index(rank)
        by_turn = _group_by_turn(sorted(set(targets).difference(sources)), len(sources))
        for tensor in tensors:
            for target in by_turn.get((own - tensor) % len(sources), ()):
                yield rank, target, tensor


def _group_by_turn(numbers: Sequence[int], turns: int) -> dict[int, list[int]]:
    """Group numbers by their remainder modulo ``turns``."""
    by_turn: dict[int, list[int]] = {}
    for number in numbers:
        by_turn.setdefault(number % turns, []).append(number)
    return by_turn


def _sort_transfers(transfers: Sequence[Transfer]) -> list[Transfer]:
    return sorted(transfers, key=lambda each: (each.kept.name, each.kept.box, each.needed.box))
