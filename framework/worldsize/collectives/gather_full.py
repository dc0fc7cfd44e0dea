"""Gather full tensors from shards on rank 0, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from worldsize.collectives.group import receive, send, start_collective
from worldsize.core import World

Result = TypeVar("Result")
_END = -1  # sent in place of a name's index when rank 0 is done


def use_full(
    tensors: Mapping[str, Tensor], world: World, use: Callable[[Mapping[str, Tensor]], Result]
) -> Result | None:
    """Call ``use`` on rank 0 with a mapping that gathers full tensors on access.

    Each rank stores at most one full tensor, in addition to those that ``use`` stores. All ranks must call this
    function with the same names. Tensors, of any shape, may be DTensors, or on the meta device if stored elsewhere.

    Returns:
        The result of ``use`` on rank 0; None on the others.
    """
    names = sorted(tensors)
    sources = _find_sources([tensors[name] for name in names], world)
    if world.rank == 0:
        full = _GatherOnAccess(
            names, lambda place: _gather_to_rank_0(tensors[names[place]].detach(), sources[place], world), world
        )
        try:
            return use(full)
        finally:
            full.close()
    while (place := _broadcast(_END, world)) != _END:
        _gather_to_rank_0(tensors[names[place]].detach(), sources[place], world)
    return None


def gather_full(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return full ``tensors`` on rank 0, else an empty dict; all ranks must call this."""
    return use_full(tensors, world, dict) or {}


@final
class _GatherOnAccess(Mapping[str, Tensor]):
    """Gathers a tensor on each access; rank 0 broadcasts the index of its name."""

    def __init__(self, names: Sequence[str], gather: Callable[[int], Tensor], world: World) -> None:
        self._places = {name: place for place, name in enumerate(names)}
        self._gather, self._world = gather, world

    def __getitem__(self, name: str) -> Tensor:
        return self._gather(_broadcast(self._places[name], self._world))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def close(self) -> None:
        """End the loops of the other ranks."""
        _broadcast(_END, self._world)


def _broadcast(place: int, world: World) -> int:
    """Return rank 0's value of ``place``."""
    if world.group is None:
        return place
    sent = torch.tensor(place, device=world.device)
    dist.broadcast(sent, group=world.group, group_src=0)
    return int(sent.item())


def _find_sources(tensors: Sequence[Tensor], world: World) -> list[int]:
    """Return the lowest rank that stores each tensor."""
    lowest = torch.tensor([world.size if tensor.is_meta else world.rank for tensor in tensors], device=world.device)
    if world.group is not None:
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=world.group)
    ranks: list[int] = lowest.tolist()
    return ranks


def _gather_to_rank_0(tensor: Tensor, source: int, world: World) -> Tensor:
    if isinstance(tensor, DTensor):
        tensor = gather_full_tensor(tensor)
    if source == 0 or world.group is None:
        return tensor
    if world.rank == source:
        send(tensor.contiguous(), world.group, to=0)
    elif world.rank == 0:
        tensor = torch.empty_like(tensor, device=world.device)
        receive(tensor, world.group, source=source)
    return tensor


def gather_full_tensor(tensor: DTensor) -> Tensor:
    """Gather the full tensor, of any shape, on all ranks of its mesh."""
    own, steps = tensor.to_local(), _plan_gathers(tensor)
    if steps is None:
        placements = list(tensor.placements)
        for axis in range(len(placements)):  # one axis at a time; torch warns if it has to choose their order
            placements[axis] = Replicate()
            tensor = tensor.redistribute(placements=placements)
        return tensor.to_local()
    for axis, dimension, size in steps:
        own = _gather_dimension(own, dimension, size, tensor.device_mesh.get_group(axis))
    return own


def _plan_gathers(tensor: DTensor) -> list[tuple[int, int, int]] | None:
    """Return (mesh axis, dimension, full size) per gather; None if only ``redistribute`` works.

    An axis that shards the shards of a later axis (FSDP with tensor parallelism) comes first.
    """
    steps: list[tuple[int, int, int]] = []
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            size, rest = divmod(tensor.shape[placement.dim], int(placement.split_factor))
            if rest:
                return None
            steps.append((axis, placement.dim, size))
        elif isinstance(placement, Shard):
            if any(each == placement for each in tensor.placements[:axis]):
                return None
            steps.append((axis, placement.dim, tensor.shape[placement.dim]))
        elif not placement.is_replicate():
            return None
    return steps


def _gather_dimension(own: Tensor, dimension: int, size: int, group: ProcessGroup) -> Tensor:
    """Gather shards along a dimension, with a wait that ends with the gang's membership."""
    first = own.movedim(dimension, 0)
    rows = -(-size // group.size())
    padded = first.new_zeros(rows, *first.shape[1:])
    padded[: len(first)] = first
    full = first.new_empty(group.size() * rows, *first.shape[1:])
    start_collective(dist.all_gather_into_tensor, full, padded, group=group).wait()
    return full[:size].movedim(0, dimension).contiguous()
