"""Tensors of which every rank has its own, as one that a checkpoint can hold.

DTensor's import takes half as long as torch's: it is left to who has such tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from worldsize.core import World


def stack_per_rank(tree: Any, world: World) -> Any:
    """Make each tensor of ``tree`` [ranks, *shape], of which each rank holds its own row; nothing is copied or sent."""
    return tree_map(lambda leaf: _stacked(leaf, world) if isinstance(leaf, Tensor) else leaf, tree)


def local_row(tree: Any) -> Any:
    """Return this rank's row of each tensor that :func:`stack_per_rank` made."""
    return tree_map(lambda leaf: local(leaf)[0] if isinstance(leaf, Tensor) else leaf, tree)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of ``tensor``."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _stacked(mine: Tensor, world: World) -> Tensor:
    row = mine.detach()[None]
    if world.group is None:
        return row
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(world.group, mine.device.type)  # an optimizer may keep its counts on the host
    return DTensor.from_local(row, mesh, [Shard(0)], run_check=False)
