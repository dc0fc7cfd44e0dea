"""The norm of a gradient that is sharded over a mesh; every part counts once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from worldsize.core import World
from worldsize.dist.gather_full import whole
from worldsize.dist.per_rank import local
from worldsize.dist.step_timer import wait
from worldsize.strategies.clipping import aligned_norm, clip_factor
from worldsize.strategies.mesh.layout import axis_of


def sharded_axes(tensor: Tensor) -> set[str]:
    """Return the names of the mesh axes along which ``tensor``, of any shape, is sharded."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    placements = zip(names, tensor.placements, strict=True)
    return {axis_of(name) for name, placement in placements if not placement.is_replicate()}


@final
class MeshNorm:
    """Clips by the norm over all ranks of ``world``.

    ``coordinate``: coordinate of this rank on each axis along which parameters may be sharded; if several ranks hold
    the same part, the first one counts it. ``spare``: parameters that an earlier stage also holds, and counts.
    """

    def __init__(self, world: World, coordinate: Mapping[str, int], spare: Collection[Tensor] = ()) -> None:
        self._world, self._coordinate = world, coordinate
        self._spare = {id(parameter) for parameter in spare}

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients to a norm of at most ``limit``; return the norm before, a scalar equal on all ranks."""
        trained = [own for own in parameters if own.grad is not None]
        norm = self._norm([local(own.grad) for own in trained if own.grad is not None and self._counts(own)])
        if limit < float("inf") and trained:
            torch._foreach_mul_([local(own.grad) for own in trained if own.grad is not None], clip_factor(norm, limit))
        return norm

    def _counts(self, parameter: nn.Parameter) -> bool:
        shared = self._coordinate.keys() - sharded_axes(parameter)
        return id(parameter) not in self._spare and all(self._coordinate[axis] == 0 for axis in shared)

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        squares = torch.zeros((), dtype=torch.float64, device=self._world.device)
        if gradients:
            squares += torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()
        wait(dist.all_reduce(squares, group=self._world.group, async_op=True))
        return squares.sqrt().float()


@final
@dataclass(frozen=True)
class WholeNorm:
    """Clips by the norm of full gradients, with the same bits for any number of data-parallel parts.

    ``pipeline``: the ranks that hold the other stages (None: there are none); ``spare``: parameters that an earlier
    stage also holds, and counts.
    """

    device: torch.device
    pipeline: ProcessGroup | None = None
    spare: Collection[Tensor] = ()

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients to a norm of at most ``limit``; return the norm before, a scalar equal on all ranks."""
        trained = list(parameters)
        norm: Tensor = torch.linalg.vector_norm(self._norms(trained))
        gradients = [local(own.grad) for own in trained if own.grad is not None]
        if limit < float("inf") and gradients:
            torch._foreach_mul_(gradients, clip_factor(norm, limit))
        return norm

    def _norms(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of the gradient of each of ``parameters``, those of all stages, that has one: (n,)."""
        spare = {id(each) for each in self.spare}
        norms = {
            place: aligned_norm(whole(own.grad) if isinstance(own.grad, DTensor) else own.grad)
            for place, own in enumerate(parameters)
            if own.grad is not None and id(own) not in spare
        }
        if self.pipeline is None:
            return torch.stack(list(norms.values()))
        table_2n = torch.zeros(2, len(parameters), device=self.device)  # the norm, and whether there is one
        for place, norm in norms.items():
            table_2n[0, place], table_2n[1, place] = norm, 1
        wait(dist.all_reduce(table_2n, group=self.pipeline, async_op=True))
        return table_2n[0][table_2n[1] > 0]
