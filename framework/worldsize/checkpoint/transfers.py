"""Says what a rank sends and takes so that a state gets from those that keep it to those that need it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import final

from worldsize.checkpoint.placements import Piece, TensorPlacement
from worldsize.checkpoint.shards import overlap
from worldsize.checkpoint.validation import Box


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
