"""Factors applied to losses: the weights of micro-batches, and the loss scale of fp16.

The gradient of a step is the gradient of the summed loss over all micro-batches, divided by their total weight. A mean
of micro-batch means would give more weight to tokens in short micro-batches. With a loss scale, updates that are
skipped after an overflow are reported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from worldsize.collectives.group import start_collective
from worldsize.collectives.per_rank import get_local_shard
from worldsize.core import Dealing
from worldsize.optimizers.groups import all_parameters

_logger = logging.getLogger(__name__)
_told: list[bool] = []  # whether this process has logged an overflow


@final
class LossScaler(torch.amp.GradScaler):
    """A GradScaler that unscales DTensor gradients separately, since kernels cannot mix them."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Return, for each device, a scalar 0 or 1: whether a gradient is not finite."""
        parameters, infinite = all_parameters(optimizer), dict[torch.device, Tensor]()
        for is_divided in (True, False):
            part: Any = SimpleNamespace(
                param_groups=[{"params": [each for each in parameters if isinstance(each, DTensor) == is_divided]}]
            )
            for device, own in super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16).items():
                infinite[device] = torch.maximum(infinite[device], own) if device in infinite else own
        return infinite


def step_scaled(scaler: torch.amp.GradScaler, optimizer: Optimizer, *, speaks: bool) -> bool:
    """Step ``optimizer`` unless its gradient overflows float16; return whether it was stepped.

    Optimizers with ``fused=True`` decide on the device. On a GPU they count as stepped, since reading the decision
    would wait for the device.

    Args:
        scaler: Holds the loss scale and checks for overflow.
        optimizer: The optimizer, with gradients multiplied by the scale.
        speaks: Whether this process logs the first overflow.
    """
    if not scaler.is_enabled():
        scaler.step(optimizer)
        return True
    stepped: list[bool] = []
    handle = optimizer.register_step_pre_hook(lambda *_: stepped.append(not _leaves_out(optimizer)))
    try:
        scaler.step(optimizer)
    finally:
        handle.remove()
    if not any(stepped) and speaks and not _told:
        _told.append(True)
        _logger.warning(
            "precision=fp16: gradient overflow in float16, skipping this update and dividing the loss scale by %g. "
            "Occasional overflows are normal, especially early in training. See `skipped` in metrics.jsonl for their "
            "number and events.jsonl for the steps. precision=bf16 does not overflow.",
            1 / scaler.get_backoff_factor(),
        )
    return any(stepped)


def _leaves_out(optimizer: Optimizer) -> bool:
    """Return whether a fused optimizer will skip its update.

    False if the decision is only on a GPU.
    """
    overflow: Tensor | None = getattr(optimizer, "found_inf", None)  # set by the scaler if the optimizer is fused
    return overflow is not None and overflow.device.type == "cpu" and bool(overflow)


def weight_factor(
    weights: Sequence[Tensor],
    group: ProcessGroup | None,
    dealing: Dealing = "cyclic",
    *,
    logical_ranks: int | None = None,
) -> Tensor:
    """Return the number of micro-batches divided by their total weight.

    The factor converts the mean of summed gradients over micro-batches to the gradient of the weighted mean. Each rank
    writes its weights to a table with zeros elsewhere, and all ranks sum the full table in the same order, so the
    factor has the same bits at every world size.

    Args:
        weights: Weight of each local micro-batch, scalars.
        group: Processes over which gradients are summed, or None for this process alone.
        dealing: The assignment of logical ranks to processes.
        logical_ranks: Total over all processes, if their shares may differ; None if all have the same number.

    Returns:
        A scalar, float64; 0 if the total weight is 0.
    """
    table = torch.stack(list(weights))
    if group is not None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        all_l = table.new_zeros(logical_ranks or len(weights) * size)
        (all_l.view(size, -1)[rank] if dealing == "block" else all_l[rank::size]).copy_(table)
        start_collective(dist.all_reduce, all_l, group=group).wait()
        table = all_l
    total = table.sum()
    return torch.where(total > 0, len(table) / total, 0.0)


def fp16_share(weight: Tensor, group: ProcessGroup | None) -> Tensor:
    """Return a power of two that scales a sum to about its mean, to fit in float16.

    Args:
        weight: Weight of this process's first micro-batch in a step, a scalar.
        group: Processes over which gradients are summed, which all use the largest weight; None: this process alone.

    Returns:
        A scalar tensor.
    """
    largest = weight.clone()
    if group is not None:
        start_collective(dist.all_reduce, largest, op=dist.ReduceOp.MAX, group=group).wait()
    return torch.exp2(-largest.clamp(min=1).log2().ceil())


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply the gradients by ``factor``, a scalar tensor, in place."""
    gradients = [get_local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]
    for device in dict.fromkeys(gradient.device for gradient in gradients):  # shards may be on the host
        own = [gradient for gradient in gradients if gradient.device == device]
        torch._foreach_mul_(own, factor.to(device, own[0].dtype))
