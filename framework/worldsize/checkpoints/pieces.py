"""Says which ranks hold which parts of a training state, and which two of them keep each part in their memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.checkpoints.shards import box_of, slices_in
from worldsize.checkpoints.validation import Box
from worldsize.collectives.per_rank import local

_ALIGNED = 64  # bytes: each part in a buffer begins at a multiple
_SMALL = 4096  # bytes of a part that is kept by all who hold it, such as an optimizer's count of steps


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
        return math.prod(self.sizes)


@final
@dataclass(frozen=True)
class Held:
    """Lists what one rank holds of the state, and names its host and its part of the data."""

    pieces: Sequence[Piece]
    dtypes: Mapping[str, torch.dtype]
    host: str
    part: int | None = None  # None: it has one of its own


def pieces_of(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """Return the part of each tensor (plain, or a DTensor) that this rank holds, by name, in their order.

    Tensors of which it holds no element are left out.
    """
    boxes: dict[Any, Box] = {}  # by form: torch takes long to compute one, and most tensors have the form of others
    pieces = {}
    for name, tensor in tensors.items():
        if not tensor.is_meta:
            form = _form_of(tensor)
            if form not in boxes:
                boxes[form] = _box_of(tensor)
            pieces[name] = Piece(name, boxes[form])
    return {name: piece for name, piece in pieces.items() if piece.elements}


def _form_of(tensor: Tensor) -> Any:
    """Return what says which part of a tensor this rank holds."""
    from torch.distributed.tensor import DTensor

    return (tensor.shape, tensor.placements, id(tensor.device_mesh)) if isinstance(tensor, DTensor) else tensor.shape


def _box_of(tensor: Tensor) -> Box:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return box_of(offsets, sizes)


def cut(tensor: Tensor, within: Box, part: Box) -> Tensor:
    """Return the view of ``part`` in ``tensor``, of the shape of ``within``: the part ``within`` of the whole."""
    slices = slices_in(part, [begin for begin, _ in within])
    return tensor[slices] if slices else tensor


@final
class Layout:
    """Says who of a group holds which parts of the state, and who keeps them; all ranks make the same one.

    Two ranks keep each part, if possible on two hosts, and of two parts of the data. If several such ranks hold it, two
    of them do, in turns, and nothing is sent; what is small all of them keep. The only rank that holds a part keeps it,
    and sends a copy to its peer; of several that all train one part of the data, one does.
    """

    def __init__(self, held: Sequence[Held], names: Collection[str] = ()) -> None:
        self.names = set(names)
        """Names of all tensors of the state."""
        self._dtypes = {name: dtype for each in held for name, dtype in each.dtypes.items()}
        self._hosts = [each.host for each in held]
        self._parts = [rank if each.part is None else each.part for rank, each in enumerate(held)]
        holders: dict[Piece, list[int]] = {}
        for rank, each in enumerate(held):
            for piece in each.pieces:
                holders.setdefault(piece, []).append(rank)
        several = {piece for piece, ranks in holders.items() if self._die_apart(ranks)}
        shared = sorted(several, key=lambda each: (-self.bytes(each), each))
        self._sole: list[list[Piece]] = [[] for _ in held]
        self._kept: list[list[Piece]] = [[] for _ in held]
        for place, piece in enumerate(each for each in holders if each not in several):
            self._sole[holders[piece][place % len(holders[piece])]].append(piece)
        for place, piece in enumerate(shared):
            for rank in self._keepers(piece, holders[piece], place):
                self._kept[rank].append(piece)
        self._distance = self._best_distance()

    def sole(self, rank: int) -> list[Piece]:
        """Return the parts that only this rank holds; it keeps them, and so does its peer."""
        return self._sole[rank]

    def kept(self, rank: int) -> list[Piece]:
        """Return the parts that this rank keeps, and other ranks, which hold them, too."""
        return self._kept[rank]

    def peer(self, rank: int) -> int:
        """Return the rank that keeps copies of what only ``rank`` holds."""
        return (rank + self._distance) % len(self._hosts)

    def peer_before(self, rank: int) -> int:
        """Return the rank of which ``rank`` keeps copies."""
        return (rank - self._distance) % len(self._hosts)

    def bytes(self, piece: Piece) -> int:
        """Return the size of a part."""
        return piece.elements * self._dtypes[piece.name].itemsize

    def placed(self, pieces: Sequence[Piece]) -> tuple[list[int], int]:
        """Return the offset of each part in a buffer that holds them all, and the size of the buffer, in bytes."""
        offsets, end = [], 0
        for piece in pieces:
            offsets.append(end)
            end += -(-self.bytes(piece) // _ALIGNED) * _ALIGNED
        return offsets, end

    def views(self, pieces: Sequence[Piece], buffer: Tensor) -> dict[Piece, Tensor]:
        """Return the parts in a buffer, bytes (n,), each with its dtype and shape."""
        offsets, _ = self.placed(pieces)
        return {
            piece: buffer[offset : offset + self.bytes(piece)].view(self._dtypes[piece.name]).view(piece.sizes)
            for piece, offset in zip(pieces, offsets, strict=True)
        }

    def _keepers(self, piece: Piece, ranks: Sequence[int], place: int) -> Sequence[int]:
        if self.bytes(piece) <= _SMALL:
            return ranks
        first = place % len(ranks)
        others = [*ranks[first + 1 :], *ranks[:first]]
        elsewhere = [rank for rank in others if self._hosts[rank] != self._hosts[ranks[first]]]
        return ranks[first], (elsewhere or others)[0]

    def _best_distance(self) -> int:
        """Return the distance to the peers at which the fewest have theirs on their own host; 0: there is none.

        Of several such distances it is the one at which the fewest train the same part of the data as their peer.
        """
        size = len(self._hosts)

        def at_home(distance: int) -> tuple[int, int]:
            pairs = [(rank, (rank + distance) % size) for rank in range(size)]
            same_host = sum(self._hosts[rank] == self._hosts[peer] for rank, peer in pairs)
            return same_host, sum(self._parts[rank] == self._parts[peer] for rank, peer in pairs)

        return min(range(1, size), key=at_home, default=0)

    def _die_apart(self, ranks: Sequence[int]) -> bool:
        """Return whether several ranks hold a part, and do not all train the one part of the data of several."""
        is_one_part = len({self._parts[rank] for rank in ranks}) == 1 < len(set(self._parts))
        return len(ranks) > 1 and not is_one_part


def gathered_layout(
    tensors: Mapping[str, Tensor], group: ProcessGroup | None, host: str, part: int | None = None
) -> Layout:
    """Gather who holds which parts of ``tensors``, of any shapes; all ranks of ``group`` must call it (None: one)."""
    return Layout(all_of(held_of(tensors, pieces_of(tensors), host, part), group), tensors)


def held_of(tensors: Mapping[str, Tensor], pieces: Mapping[str, Piece], host: str, part: int | None) -> Held:
    """Return what this rank says of the ``pieces`` that it holds of ``tensors``, of any shapes."""
    return Held([*pieces.values()], {name: tensors[name].dtype for name in pieces}, host, part)


def all_of(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Gather a plain value of each rank of ``group`` (None: this process is alone)."""
    if group is None:
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def copied(tensors: Mapping[str, Tensor], views: Mapping[Piece, Tensor]) -> None:
    """Copy this rank's parts of ``tensors`` into ``views``; all have the shapes of their parts."""
    if views:
        sources = [local(tensors[piece.name]).detach() for piece in views]
        torch._foreach_copy_(list(views.values()), sources, non_blocking=True)


def missing_elements(pieces: Collection[Piece], total: int) -> int:
    """Return how many of the ``total`` elements of the state are in none of ``pieces``, which do not overlap."""
    return total - sum(piece.elements for piece in pieces)
