"""Represents tensors that differ between ranks as one sharded tensor, so that a checkpoint can hold them.

:func:`make_equal` broadcasts the weights of one process to all others, so that tensors do not differ.

Importing DTensor takes half as long as importing torch, so that it is only imported when there are such tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from worldsize.collectives.step_timer import wait
from worldsize.core import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def stack_per_rank(tree: Any, world: World) -> Any:
    """Wrap each tensor of ``tree`` as a DTensor (ranks, *shape) of which each rank holds its own row.

    Nothing is copied or sent.
    """
    return tree_map(lambda leaf: _stacked(leaf, world) if isinstance(leaf, Tensor) else leaf, tree)


def local_row(tree: Any) -> Any:
    """Undo :func:`stack_per_rank`: return this rank's row, of its original shape, of each tensor of ``tree``."""
    return tree_map(lambda leaf: local(leaf)[0] if isinstance(leaf, Tensor) else leaf, tree)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's local shard of a DTensor; any other tensor of any shape as it is."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def zeros_like(tensor: Tensor) -> Tensor:
    """Return zeros in the form of ``tensor``, of any shape, sharded as it is.

    Nothing is sent, and torch need not determine how the result is sharded.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return torch.zeros_like(tensor)
    return sharded_like(tensor, torch.zeros_like(tensor.to_local()))


def sharded_like(like: DTensor, part: Tensor) -> DTensor:
    """Return ``part``, this rank's shard of a tensor of any shape, as a DTensor in the form of ``like``.

    They share memory, also if that is the host's and the mesh is one of GPUs, to which DTensor.from_local would copy.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(like.shape, like.stride(), part.dtype)
    form = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(part.detach(), form, requires_grad=False)


def _stacked(mine: Tensor, world: World) -> Tensor:
    row = mine.detach()[None]
    if world.group is None:
        return row
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(world.group, mine.device.type)  # an optimizer may keep its counts on the host
    return DTensor.from_local(row, mesh, [Shard(0)], run_check=False)


def make_equal(model: nn.Module, group: ProcessGroup | None) -> None:
    """Broadcast parameters and dense buffers from the first rank of ``group`` to the others; None: do nothing."""
    if group is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.layout is torch.strided:
                wait(dist.broadcast(first := tensor.detach().contiguous(), group=group, group_src=0, async_op=True))
                tensor.detach().copy_(first)
