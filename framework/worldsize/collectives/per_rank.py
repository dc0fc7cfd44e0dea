"""Tensors of which every rank has its own, as one that a checkpoint can hold.

DTensor's import takes half as long as torch's: it is left to who has such tensors.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from worldsize.core import World


def stacked(mine: Tensor, world: World) -> Tensor:
    """[ranks, *mine.shape], of which each rank holds its own row; nothing is copied or sent."""
    if world.group is None:
        return mine[None]
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(world.group, mine.device.type)  # an optimizer may keep its counts on the host
    return DTensor.from_local(mine[None], mesh, [Shard(0)], run_check=False)


def own(rows: Tensor) -> Tensor:
    """This rank's row of what :func:`stacked` gave."""
    return local(rows)[0]


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of ``tensor``."""
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
