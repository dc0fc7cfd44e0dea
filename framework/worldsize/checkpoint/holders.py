"""Assignment of replicated tensors to the ranks that write them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from worldsize.core import World
from worldsize.errors import CheckpointError

DIFFERENT = "tensor names, dtypes or shapes differ between ranks; pass the same tensors on all ranks"


def partly_held(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return a mask of the ranks that hold each partly held tensor, bool (ranks,), by tensor name.

    A partly held tensor is on the meta device on some ranks. This is a collective: every rank must call it.

    Raises:
        CheckpointError: the tensor names differ between ranks.
    """
    names = sorted(tensors)
    if world.group is None:
        return {}
    _check_same(names, world)
    mine_n = torch.tensor([not tensors[name].is_meta for name in names], dtype=torch.int32, device=world.device)
    counts_n = mine_n.clone()
    dist.all_reduce(counts_n, group=world.group)
    partly_n = counts_n < world.size
    if not bool(partly_n.any()):
        return {}
    part_m = mine_n[partly_n].to(torch.uint8)
    held_pm = part_m.new_empty(world.size, len(part_m))
    dist.all_gather_into_tensor(held_pm.view(-1), part_m, group=world.group)
    partly = [name for name, is_partly in zip(names, partly_n.tolist(), strict=True) if is_partly]
    return dict(zip(partly, held_pm.T.bool().cpu(), strict=True))


def _check_same(names: Collection[str], world: World) -> None:
    number = int.from_bytes(hashlib.sha256("\n".join(names).encode()).digest()[:7], "big")
    bounds = torch.tensor([number, -number], device=world.device)
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=world.group)
    greatest, least_negated = bounds.tolist()
    if greatest != -least_negated:
        raise CheckpointError(DIFFERENT)


def select_tensors_to_write(
    tensors: Mapping[str, Tensor], partly: Mapping[str, Tensor], world: World
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors this rank writes: its shards, and a share of the replicated tensors.

    Replicated tensors are assigned greedily, largest first, to balance the bytes written per rank.

    Args:
        tensors: The full state, of any shapes; tensors not held by this rank are on the meta device.
        partly: The result of :func:`partly_held` for ``tensors``.
        world: The ranks that write.
    """
    loads_p = torch.zeros(world.size, dtype=torch.int64)
    full = torch.iinfo(torch.int64).max
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        tensor = tensors[name]
        if isinstance(tensor, DTensor):
            yield name, tensor
            continue
        least = int((torch.where(partly[name], loads_p, full) if name in partly else loads_p).argmin())  # first minimum
        loads_p[least] += tensor.nbytes
        if least == world.rank:
            yield name, tensor
