"""Copies of one process's weights on all others."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup


def make_equal(model: nn.Module, group: ProcessGroup | None) -> None:
    """Copy the weights and the saved buffers of the first rank of ``group`` to all others; None: there are none."""
    if group is not None:
        for tensor in model.state_dict().values():
            dist.broadcast(first := tensor.contiguous(), group=group, group_src=0)
            tensor.copy_(first)
