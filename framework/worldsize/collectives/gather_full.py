"""Tensors that are spread over ranks, in full on one of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from worldsize.core import World


def holders(tensors: Mapping[str, Tensor], world: World) -> dict[str, list[int]]:
    """The ranks that hold each tensor; where it is on the meta device, others do."""
    mine = [name for name, tensor in tensors.items() if not tensor.is_meta]
    held: list[list[str]] = [mine] * world.size
    if world.group is not None:
        dist.all_gather_object(held, mine, group=world.group)
    ranks_by_name: dict[str, list[int]] = {name: [] for name in sorted(tensors)}
    for rank, names in enumerate(held):
        for name in names:
            ranks_by_name.setdefault(name, []).append(rank)
    return ranks_by_name


def gather_full(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return all of ``tensors`` in full on rank 0, and nothing on the others, which must call it too."""
    full = {}
    for name, ranks in holders(tensors, world).items():
        tensor = _full(tensors[name].detach(), ranks[0], world)
        if world.rank == 0:
            full[name] = tensor
    return full


def _full(tensor: Tensor, source: int, world: World) -> Tensor:
    if isinstance(tensor, DTensor):
        tensor = _gathered(tensor)
    if source == 0 or world.group is None:
        return tensor
    if world.rank == source:
        dist.send(tensor.contiguous(), group=world.group, group_dst=0)
    elif world.rank == 0:
        tensor = torch.empty_like(tensor, device=world.device)
        dist.recv(tensor, group=world.group, group_src=source)
    return tensor


def _gathered(tensor: DTensor) -> Tensor:
    """Gather one axis of the mesh after the other: torch warns where it has to do several in an order of its own."""
    placements = list(tensor.placements)
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()
