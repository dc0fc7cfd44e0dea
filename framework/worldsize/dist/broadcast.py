"""Broadcasts the weights of one process to all others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from worldsize.dist.step_timer import wait


def make_equal(model: nn.Module, group: ProcessGroup | None) -> None:
    """Broadcast parameters and dense buffers from the first rank of ``group`` to the others; None: do nothing."""
    if group is not None:
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.layout is torch.strided:
                wait(dist.broadcast(first := tensor.detach().contiguous(), group=group, group_src=0, async_op=True))
                tensor.detach().copy_(first)
