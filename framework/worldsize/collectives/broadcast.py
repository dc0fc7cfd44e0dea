"""Broadcasts the weights of one process to all others."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup


def make_equal(model: nn.Module, group: ProcessGroup | None) -> None:
    """Broadcast parameters and saved buffers from the first rank of ``group`` to the others; None: do nothing."""
    if group is not None:
        for tensor in model.state_dict().values():
            dist.broadcast(first := tensor.contiguous(), group=group, group_src=0)
            tensor.copy_(first)
