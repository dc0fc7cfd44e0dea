"""Sends tensors of any shape between stages, since the last batch of an evaluation is smaller than the others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_HEADER = 10  # dtype, dimensions, and up to eight sizes


def send(tensor: Tensor, group: ProcessGroup, to: int) -> None:
    """Send ``tensor``, of any shape up to 8 dimensions, to rank ``to`` of ``group``, which must :func:`receive`."""
    header = torch.zeros(_HEADER, dtype=torch.int64)
    header[0], header[1] = _DTYPES.index(tensor.dtype), tensor.ndim
    header[2 : 2 + tensor.ndim] = torch.tensor(tensor.shape)
    dist.send(header.to(tensor.device), group=group, group_dst=to)
    dist.send(tensor.contiguous(), group=group, group_dst=to)


def receive(group: ProcessGroup, source: int, device: torch.device) -> Tensor:
    """Receive, on ``device``, the tensor that rank ``source`` of ``group`` sends by :func:`send`, in its shape."""
    header = torch.empty(_HEADER, dtype=torch.int64, device=device)
    dist.recv(header, group=group, group_src=source)
    dtype, dimensions, *sizes = header.tolist()
    tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[dtype], device=device)
    dist.recv(tensor, group=group, group_src=source)
    return tensor
