"""Weighted losses: the gradient of a step is that of the sum over all micro-batches, divided by their total weight.

A mean of micro-batch means would give the tokens of a short micro-batch more weight than those of a long one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from worldsize.core import Dealing
from worldsize.dist.per_rank import local
from worldsize.dist.step_timer import phase


def weight_factor(
    weights: Sequence[Tensor],
    group: ProcessGroup | None,
    dealing: Dealing = "cyclic",
    *,
    logical_ranks: int | None = None,
) -> Tensor:
    """Return the number of micro-batches divided by their total weight.

    It converts the mean over micro-batches of summed gradients to the gradient of the weighted mean. Each rank writes
    its weights into a table that is zero elsewhere, and all ranks sum the full table in the same order, so that the
    bits are the same at every world size.

    Args:
        weights: Weight of each local micro-batch, scalars.
        group: Processes whose gradients are summed; None: this one alone.
        dealing: The assignment of logical ranks to processes.
        logical_ranks: Those of all processes, which may have different numbers of them; None: all have equally many.

    Returns:
        A scalar, float64; 0 if the total weight is 0.
    """
    table = torch.stack(list(weights))
    if group is not None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        all_l = table.new_zeros(logical_ranks or len(weights) * size)
        (all_l.view(size, -1)[rank] if dealing == "block" else all_l[rank::size]).copy_(table)
        with phase("communication"):
            dist.all_reduce(all_l, group=group)
        table = all_l
    total = table.sum()
    return torch.where(total > 0, len(table) / total, 0.0)


def fp16_share(weight: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return a power of two that scales a sum to about its mean, so that its gradients fit in the range of float16.

    Args:
        weight: Weight of this process's first micro-batch of a step, a scalar.
        group: Processes whose gradients are summed, which use the largest weight; None: this one alone.

    Returns:
        A scalar tensor.
    """
    largest = weight.clone()
    if group is not None:
        with phase("communication"):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return torch.exp2(-largest.clamp(min=1).log2().ceil())


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients by ``factor``, a scalar tensor, in place."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    for device in dict.fromkeys(gradient.device for gradient in gradients):  # shards may be on the host
        own = [gradient for gradient in gradients if gradient.device == device]
        torch._foreach_mul_(own, factor.to(device, own[0].dtype))
