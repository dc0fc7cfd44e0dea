"""Layers that ranks share, with waits that end when the gang does; those of DTensors end when their peers answer."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from worldsize.dist.step_timer import wait


@final
class InterruptibleColumn(ColwiseParallel):
    """Divides a linear layer by its output features; sums the gradients of its inputs, (..., features), over ranks."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: nn.Module, inputs: Any, device_mesh: DeviceMesh
    ) -> DTensor:
        shared = _SummedGradient.apply(inputs[0], device_mesh.get_group())
        return DTensor.from_local(shared, device_mesh, [Replicate()], grad_placements=[Partial()])


@final
class InterruptibleRow(RowwiseParallel):
    """Divides a linear layer by its input features; sums its outputs, (..., features), over ranks."""

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Tensor:
        part = outputs.redistribute(placements=[Partial()]).to_local(grad_placements=[Replicate()])
        total: Tensor = _Sum.apply(part, device_mesh.get_group())
        return total


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shared: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return shared.view_as(shared)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return _sum(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        return _sum(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


def _sum(part: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of the tensors of all ranks of ``group``, which have the same shape."""
    total = part.clone(memory_format=torch.contiguous_format)
    wait(dist.all_reduce(total, group=group, async_op=True))
    return total
