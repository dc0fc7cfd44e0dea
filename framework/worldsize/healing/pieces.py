"""Layout of a training state's shards: their holders, and the two ranks that store each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.checkpoint.manifest_tree import Box
from worldsize.checkpoint.safetensors import build_box, slices_in
from worldsize.collectives.per_rank import get_local_shard
from worldsize.healing.placements import Inventory, Piece, build_inventory, build_placements, elements_in

_T = TypeVar("_T")
_ALIGNED = 64  # alignment in bytes of each shard in a buffer
_SMALL = 4096  # bytes up to which all holders of a shard copy it, such as an optimizer's step count


@final
@dataclass(frozen=True)
class Place:
    """A rank's host and its data-parallel rank ``part``.

    ``part`` is None if each rank is a data-parallel replica.
    """

    host: str
    part: int | None = None


@final
@dataclass(frozen=True)
class Held:
    """The shards of the state that a rank holds, and the rank's place."""

    inventory: Inventory
    place: Place


@final
@dataclass
class Generation:
    """This process's copies of the state after one step.

    Attributes:
        number: Number of the membership that made the copies.
        step: Step after which the copies were made.
        skipped: Number of steps so far with skipped updates.
        values: The plain values of the state, see :func:`worldsize.checkpoint.manifest_tree.split_tensors`.
        elements: Number of elements in all tensors of the state.
        dtypes: Dtypes of all tensors of the state, by name.
        parts: Copies in host memory, each with the shape of its shard.
        shared: Plain values that every process stores.
    """

    number: int
    step: int
    skipped: int
    values: Any
    elements: int
    dtypes: Mapping[str, torch.dtype]
    parts: Mapping[Piece, Tensor]
    shared: Any = None


def collect_pieces(tensors: Mapping[str, Tensor]) -> dict[str, Piece]:
    """Return the shard of each tensor (plain or DTensor) that this rank holds, by name.

    Tensors without elements on this rank are omitted.
    """
    boxes: dict[Any, Box] = {}  # cached by form, since torch computes them slowly and most tensors share a form
    pieces = {}
    for name, tensor in tensors.items():
        if not tensor.is_meta:
            form = _build_form_key(tensor)
            if form not in boxes:
                boxes[form] = _compute_box(tensor)
            pieces[name] = Piece(name, boxes[form])
    return {name: piece for name, piece in pieces.items() if piece.elements}


def _build_form_key(tensor: Tensor) -> Any:
    """Return a cache key; tensors with equal keys have the same box on this rank."""
    from torch.distributed.tensor import DTensor

    return (tensor.shape, tensor.placements, id(tensor.device_mesh)) if isinstance(tensor, DTensor) else tensor.shape


def _compute_box(tensor: Tensor) -> Box:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return build_box(offsets, sizes)


def slice_box(tensor: Tensor, within: Box, part: Box) -> Tensor:
    """Return a view of box ``part`` in ``tensor``, the shard with box ``within``.

    Boxes are in indices of the full tensor.
    """
    slices = slices_in(part, [begin for begin, _ in within])
    return tensor[slices] if slices else tensor


@final
class PieceLayout:
    """Assigns shards of the state to the ranks that store them; identical on all ranks.

    A rank holds the shards that it trains, and stores copies. Two ranks store each shard, if possible on different
    hosts and with different data-parallel ranks. If ranks of several data-parallel replicas hold a shard, two holders
    store it (chosen in turn; all of them if it is small), and nothing is sent. In a gang of one replica, any two
    holders suffice. Otherwise, one holder stores the shard and sends a copy to a peer.

    Args:
        held: The shards that each rank holds.
        dtypes: Dtype of each tensor of the state, by name.
    """

    def __init__(self, held: Sequence[Held], dtypes: Mapping[str, torch.dtype]) -> None:
        self.dtypes = {name: dtypes[name] for name in sorted(dtypes)}
        """Dtypes of all tensors of the state, by name in sorted order."""
        self.placements = build_placements([each.inventory for each in held])
        """The ranks that hold each shard, largest shards first."""
        self.placements.sort(key=lambda each: (-max(map(elements_in, each.ranks)), each.tensors))
        self._hosts = [each.place.host for each in held]
        self._parts = [rank if each.place.part is None else each.place.part for rank, each in enumerate(held)]
        self._has_one_part = len(set(self._parts)) == 1
        self._distance = self._best_distance()

    def list_sole(self, rank: int) -> list[Piece]:
        """Return the shards that only ``rank`` stores among their holders; its peer gets copies."""
        return [piece for piece, keepers in self._assign_keepers(rank) if len(keepers) == 1]

    def list_shared(self, rank: int) -> list[Piece]:
        """Return the shards that ``rank`` and other holders store."""
        return [piece for piece, keepers in self._assign_keepers(rank) if len(keepers) > 1]

    def find_peer(self, rank: int) -> int:
        """Return the rank to which ``rank`` sends copies."""
        return (rank + self._distance) % len(self._hosts)

    def peer_before(self, rank: int) -> int:
        """Return the rank from which ``rank`` receives copies."""
        return (rank - self._distance) % len(self._hosts)

    def count_bytes(self, piece: Piece) -> int:
        """Return the size of a shard in bytes."""
        return piece.elements * self.dtypes[piece.name].itemsize

    def compute_offsets(self, pieces: Sequence[Piece]) -> tuple[list[int], int]:
        """Return the offset of each shard in a common buffer, and the size of the buffer, in bytes."""
        offsets, end = [], 0
        for piece in pieces:
            offsets.append(end)
            end += -(-self.count_bytes(piece) // _ALIGNED) * _ALIGNED
        return offsets, end

    def create_views(self, pieces: Sequence[Piece], buffer: Tensor) -> dict[Piece, Tensor]:
        """Return a view of each shard in the uint8 vector ``buffer``, in its dtype and shape."""
        offsets, _ = self.compute_offsets(pieces)
        return {
            piece: buffer[offset : offset + self.count_bytes(piece)].view(self.dtypes[piece.name]).view(piece.sizes)
            for piece, offset in zip(pieces, offsets, strict=True)
        }

    def _assign_keepers(self, rank: int) -> Iterator[tuple[Piece, Sequence[int]]]:
        """Yield each shard that ``rank`` both holds and stores, with all ranks that do so."""
        names, turns = list(self.dtypes), 0
        for placement in self.placements:
            for number, (box, ranks) in enumerate(placement.ranks.items()):
                if rank in ranks:
                    die_apart = self._die_apart(ranks)
                    for turn, tensor in enumerate(placement.tensors, turns + number):
                        piece = Piece(names[tensor], box)
                        keepers = self._choose_keepers(piece, ranks, turn) if die_apart else [ranks[turn % len(ranks)]]
                        if rank in keepers:
                            yield piece, keepers
            turns += len(placement.tensors)

    def _choose_keepers(self, piece: Piece, ranks: Sequence[int], turn: int) -> Sequence[int]:
        """Return which of the ``ranks`` with a shard store it; ``turn`` balances the load."""
        if self.count_bytes(piece) <= _SMALL:
            return ranks
        first, following = (ranks[(turn + step) % len(ranks)] for step in (0, 1))
        others = (ranks[(turn + step) % len(ranks)] for step in range(1, len(ranks)))
        return first, next((rank for rank in others if self._hosts[rank] != self._hosts[first]), following)

    def _best_distance(self) -> int:
        """Return the rank distance with the fewest peers on the same host; 0 without peers.

        Ties are broken by the fewest peers with the same data-parallel rank.
        """
        numbers = {host: number for number, host in enumerate(dict.fromkeys(self._hosts))}
        hosts_r, parts_r = torch.tensor([numbers[host] for host in self._hosts]), torch.tensor(self._parts)
        best, fewest = 0, (len(self._hosts) + 1, 0)
        for distance in range(1, len(self._hosts)):
            at_home = _count_shared(distance, hosts_r), _count_shared(distance, parts_r)
            if at_home < fewest:
                best, fewest = distance, at_home
            if at_home == (0, 0):
                break
        return best

    def _die_apart(self, ranks: Sequence[int]) -> bool:
        """Return whether ``ranks`` are redundant.

        There must be several, in different data-parallel replicas if the gang has several replicas.
        """
        is_one_part = not self._has_one_part and len({self._parts[rank] for rank in ranks}) == 1
        return len(ranks) > 1 and not is_one_part


def _count_shared(distance: int, values_r: Tensor) -> int:
    """Return the number of ranks r with the same value as rank (r + ``distance``) mod size."""
    return int(torch.count_nonzero(values_r == values_r.roll(-distance)))


def gather_layout(tensors: Mapping[str, Tensor], group: ProcessGroup | None, place: Place) -> PieceLayout:
    """Gather the holders of all shards, as a collective on ``group`` (None: one process)."""
    dtypes = collect_dtypes(tensors)
    return PieceLayout(
        gather_values(Held(build_inventory(collect_pieces(tensors).values(), dtypes), place), group), dtypes
    )


def collect_dtypes(tensors: Mapping[str, Tensor]) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor."""
    return {name: tensor.dtype for name, tensor in tensors.items()}


def gather_values(value: Any, group: ProcessGroup | None) -> list[Any]:
    """All-gather a picklable value over ``group`` (None: one process), in rank order."""
    if group is None:
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def broadcast(value: _T, source: int, group: ProcessGroup | None) -> _T:
    """Return rank ``source``'s plain value, as a collective on ``group`` (None: one process)."""
    values = [value]
    if group is not None:
        dist.broadcast_object_list(values, group=group, group_src=source)
    return values[0]


def copy_pieces(tensors: Mapping[str, Tensor], views: Mapping[Piece, Tensor]) -> None:
    """Copy this rank's shards of ``tensors`` into ``views`` of the same shapes."""
    if views:
        sources = [get_local_shard(tensors[piece.name]).detach() for piece in views]
        torch._foreach_copy_(list(views.values()), sources, non_blocking=True)
