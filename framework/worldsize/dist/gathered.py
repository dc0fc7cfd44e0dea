"""Averages small tensors in one round: every rank gathers all rows and adds them up itself.

An all-reduce needs two rounds. On a CPU a round costs several thread wake-ups, far more than sending a few kilobytes.
With gloo on loopback one gather takes half the time of an all-reduce, up to about 1 MiB of gathered rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from worldsize.dist.ordered import sum_level
from worldsize.dist.step_timer import wait

LARGEST = 1 << 20  # bytes of all rows together


def is_small(module: nn.Module, size: int) -> bool:
    """Return whether gathering the gradients of ``module`` from ``size`` ranks is faster than an all-reduce."""
    gradients = [parameter for parameter in module.parameters() if parameter.requires_grad]
    on_cpu = all(parameter.device.type == "cpu" for parameter in gradients)
    return on_cpu and size * sum(parameter.nbytes for parameter in gradients) <= LARGEST


def gathered_mean(row_n: Tensor, group: ProcessGroup) -> Tensor:
    """Replace each rank's ``row_n``, of shape (n,), by the mean over ranks, with the same bits on every rank."""
    size = dist.get_world_size(group)
    rows_pn = row_n.new_empty(size * row_n.numel())
    wait(dist.all_gather_into_tensor(rows_pn, row_n, group=group, async_op=True))
    return torch.div(sum_level(rows_pn.view(size, -1)), size, out=row_n)
