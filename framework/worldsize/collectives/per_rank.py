"""Tensors that differ between ranks, as one sharded tensor for checkpoints.

:func:`make_equal` broadcasts the weights of one process to all others, to make them equal.

Importing DTensor takes half as long as importing torch, so it is imported only where needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from worldsize.collectives.group import start_collective
from worldsize.core import World

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def stack_per_rank(tree: Any, world: World) -> Any:
    """Wrap each tensor of ``tree`` as one row of a DTensor (ranks, *shape), without copying."""
    return tree_map(lambda leaf: _stack_row(leaf, world) if isinstance(leaf, Tensor) else leaf, tree)


def local_row(tree: Any) -> Any:
    """Undo :func:`stack_per_rank`: return this rank's row, in its shape, of each tensor."""
    return tree_map(lambda leaf: get_local_shard(leaf)[0] if isinstance(leaf, Tensor) else leaf, tree)


def get_local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or any other tensor, of any shape, unchanged."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def zeros_like(tensor: Tensor) -> Tensor:
    """Return zeros with the shape and sharding of ``tensor``.

    This neither communicates nor uses torch's sharding propagation.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return torch.zeros_like(tensor)
    return shard_like(tensor, torch.zeros_like(tensor.to_local()))


def shard_like(like: DTensor, part: Tensor) -> DTensor:
    """Wrap ``part``, this rank's shard of any shape, in a DTensor with the sharding of ``like``.

    Both share memory, even on the host with a GPU mesh, where DTensor.from_local would copy to the GPU.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(like.shape, like.stride(), part.dtype)
    form = DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta)
    return DTensor(part.detach(), form, requires_grad=False)


def _stack_row(mine: Tensor, world: World) -> Tensor:
    row = mine.detach()[None]
    if world.group is None:
        return row
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(world.group, mine.device.type)  # optimizers may store step counts on the host
    return DTensor.from_local(row, mesh, [Shard(0)], run_check=False)


def make_equal(model: nn.Module, group: ProcessGroup | None) -> None:
    """Broadcast parameters and dense buffers from the first rank of ``group``, unless None."""
    if group is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.layout is torch.strided:
                start_collective(dist.broadcast, first := tensor.detach().contiguous(), group=group, group_src=0).wait()
                tensor.detach().copy_(first)
