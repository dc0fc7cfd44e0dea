"""Sends tensors of any shape between stages, since the last batch of an evaluation is smaller than the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.dist.step_timer import wait
from worldsize.strategies.mesh.edges import Edges

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_HEADER = 10  # dtype, dimensions, and up to eight sizes


@final
@dataclass(frozen=True)
class Passing:
    """Passes tensors along the ranks of ``group``; ``edges``: send them, if waits are to end when the gang does."""

    group: ProcessGroup
    edges: Edges | None
    device: torch.device

    def send(self, tensor: Tensor, to: int) -> None:
        """Send ``tensor``, of any shape up to 8 dimensions, to rank ``to``, which must :meth:`receive`."""
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[0], header[1] = _DTYPES.index(tensor.dtype), tensor.ndim
        header[2 : 2 + tensor.ndim] = torch.tensor(tensor.shape)
        for part in (header.to(tensor.device), tensor.contiguous()):
            if self.edges:
                wait(self.edges.start(part, self.group.rank(), to))
            else:
                dist.send(part, group=self.group, group_dst=to)

    def receive(self, source: int) -> Tensor:
        """Receive the tensor that rank ``source`` sends by :meth:`send`, in its shape."""
        header = torch.empty(_HEADER, dtype=torch.int64, device=self.device)
        self._fill(header, source)
        dtype, dimensions, *sizes = header.tolist()
        tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[dtype], device=self.device)
        self._fill(tensor, source)
        return tensor

    def _fill(self, tensor: Tensor, source: int) -> None:
        if self.edges:
            wait(self.edges.start(tensor, source, self.group.rank()))
        else:
            dist.recv(tensor, group=self.group, group_src=source)
