"""Says which ranks hold which parts of a training state, and which two of them keep each part in their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.checkpoint.manifest_tree import Box
from worldsize.checkpoint.placements import Inventory, Piece, elements_in, inventory_of, placements_of
from worldsize.checkpoint.safetensors import box_of, slices_in
from worldsize.collectives.per_rank import local

_ALIGNED = 64  # bytes: each part in a buffer begins at a multiple
_SMALL = 4096  # bytes of a part that is kept by all who hold it, such as an optimizer's count of steps


@final
@dataclass(frozen=True)
class Place:
    """Names the host of a rank, and the part of the data that it trains; None: one of its own."""

    host: str
    part: int | None = None


@final
@dataclass(frozen=True)
class Held:
    """Says what one rank holds of the state, and where it is."""

    inventory: Inventory
    place: Place


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
class PieceLayout:
    """Says who of a group holds which parts of the state, and who keeps them; all ranks make the same one.

    Two ranks keep each part, if possible on two hosts, and of two parts of the data. If several such ranks hold it, two
    of them do, in turns, and nothing is sent; what is small all of them keep. The only rank that holds a part keeps it,
    and sends a copy to its peer; of several that all train one part of the data, one does.

    Args:
        held: What each rank holds.
        dtypes: Those of all tensors of the state, by name.
    """

    def __init__(self, held: Sequence[Held], dtypes: Mapping[str, torch.dtype]) -> None:
        self.dtypes = {name: dtypes[name] for name in sorted(dtypes)}
        """Those of all tensors of the state, by name."""
        self.placements = placements_of([each.inventory for each in held])
        """Who holds which parts, the largest first."""
        self.placements.sort(key=lambda each: (-max(map(elements_in, each.ranks)), each.tensors))
        self._hosts = [each.place.host for each in held]
        self._parts = [rank if each.place.part is None else each.place.part for rank, each in enumerate(held)]
        self._has_one_part = len(set(self._parts)) == 1
        self._distance = self._best_distance()

    def sole(self, rank: int) -> list[Piece]:
        """Return the parts that only this rank keeps of those who hold them, and so does its peer."""
        return [piece for piece, keepers in self._keepers(rank) if len(keepers) == 1]

    def kept(self, rank: int) -> list[Piece]:
        """Return the parts that this rank keeps, and other ranks, which hold them, too."""
        return [piece for piece, keepers in self._keepers(rank) if len(keepers) > 1]

    def peer(self, rank: int) -> int:
        """Return the rank that keeps copies of what only ``rank`` holds."""
        return (rank + self._distance) % len(self._hosts)

    def peer_before(self, rank: int) -> int:
        """Return the rank of which ``rank`` keeps copies."""
        return (rank - self._distance) % len(self._hosts)

    def bytes(self, piece: Piece) -> int:
        """Return the size of a part."""
        return piece.elements * self.dtypes[piece.name].itemsize

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
            piece: buffer[offset : offset + self.bytes(piece)].view(self.dtypes[piece.name]).view(piece.sizes)
            for piece, offset in zip(pieces, offsets, strict=True)
        }

    def _keepers(self, rank: int) -> Iterator[tuple[Piece, Sequence[int]]]:
        """Yield each part that a rank holds and keeps, and the ranks that do so."""
        names, turns = list(self.dtypes), 0
        for placement in self.placements:
            for number, (box, ranks) in enumerate(placement.ranks.items()):
                if rank in ranks:
                    die_apart = self._die_apart(ranks)
                    for turn, tensor in enumerate(placement.tensors, turns + number):
                        piece = Piece(names[tensor], box)
                        keepers = self._chosen(piece, ranks, turn) if die_apart else [ranks[turn % len(ranks)]]
                        if rank in keepers:
                            yield piece, keepers
            turns += len(placement.tensors)

    def _chosen(self, piece: Piece, ranks: Sequence[int], turn: int) -> Sequence[int]:
        """Return those that keep a part that several ranks hold."""
        if self.bytes(piece) <= _SMALL:
            return ranks
        first, following = (ranks[(turn + step) % len(ranks)] for step in (0, 1))
        others = (ranks[(turn + step) % len(ranks)] for step in range(1, len(ranks)))
        return first, next((rank for rank in others if self._hosts[rank] != self._hosts[first]), following)

    def _best_distance(self) -> int:
        """Return the distance to the peers at which the fewest have theirs on their own host; 0: there is none.

        Of several such distances it is the one at which the fewest train the same part of the data as their peer.
        """
        numbers = {host: number for number, host in enumerate(dict.fromkeys(self._hosts))}
        hosts_r, parts_r = torch.tensor([numbers[host] for host in self._hosts]), torch.tensor(self._parts)
        best, fewest = 0, (len(self._hosts) + 1, 0)
        for distance in range(1, len(self._hosts)):
            at_home = _shared_at(distance, hosts_r), _shared_at(distance, parts_r)
            if at_home < fewest:
                best, fewest = distance, at_home
            if at_home == (0, 0):
                break
        return best

    def _die_apart(self, ranks: Sequence[int]) -> bool:
        """Return whether several ranks hold a part, and do not all train the one part of the data of several."""
        is_one_part = not self._has_one_part and len({self._parts[rank] for rank in ranks}) == 1
        return len(ranks) > 1 and not is_one_part


def _shared_at(distance: int, values_r: Tensor) -> int:
    """Return how many ranks have the same value as the one at a distance."""
    return int(torch.count_nonzero(values_r == values_r.roll(-distance)))


def gathered_layout(tensors: Mapping[str, Tensor], group: ProcessGroup | None, place: Place) -> PieceLayout:
    """Gather who holds which parts of ``tensors``, of any shapes; all ranks of ``group`` must call it (None: one)."""
    dtypes = dtypes_of(tensors)
    return PieceLayout(all_of(Held(inventory_of(pieces_of(tensors).values(), dtypes), place), group), dtypes)


def dtypes_of(tensors: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor."""
    return {name: tensor.dtype for name, tensor in tensors.items()}


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
