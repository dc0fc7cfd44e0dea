"""Tensors of which every worker has its own, as one tensor that a checkpoint can hold."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from worldsize.core import World


def spread(tree: Any, world: World) -> Any:
    """Each tensor of ``tree`` as this worker's row of [workers, *shape]; in the same memory."""
    return tree_map(lambda leaf: _row(leaf.detach()[None], world) if isinstance(leaf, Tensor) else leaf, tree)


def _row(row: Tensor, world: World) -> Tensor:
    if world.group is None:
        return row
    mesh = DeviceMesh.from_group(world.group, row.device.type)
    return DTensor.from_local(row, mesh, [Shard(0)], run_check=False)


def own(tree: Any) -> Any:
    """What :func:`spread` was given, on this worker."""
    return tree_map(lambda leaf: _local(leaf)[0] if isinstance(leaf, Tensor) else leaf, tree)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
