"""Times the waits of a model that ``fully_shard`` has sharded, by wrapping its collectives.

On the CPU these collectives block, so that the call is the wait, which ends when the gang does. On CUDA they run on
their own streams and return at once. Waits between streams are visible to no hook of PyTorch and count as the phase in
which they happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from worldsize.collectives.step_timer import mark, started, wait

_Size = Sequence[int | torch.SymInt]
_UNLIMITED = timedelta()


def time_sharding(model: nn.Module, device: torch.device, *, copies: bool) -> None:
    """Time the waits of every sharded part of ``model``.

    ``copies``: gradients are also summed over replicas of the sharded model, as in HSDP.
    """
    if device.type != "cpu":
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_TimedAllGather())
            module.set_custom_reduce_scatter(_TimedReduceScatter(then_all_reduce=copies))
            if copies:
                module.set_all_reduce_hook(lambda _: mark("compute"))  # called when copies have been summed


@final
class _TimedAllGather(AllGather):
    def allocate(self, size: _Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> Work | None:
        work = started(dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True))
        return _begun(work, async_op=async_op)


@final
class _TimedReduceScatter(ReduceScatter):
    def __init__(self, *, then_all_reduce: bool) -> None:
        self._then_all_reduce = then_all_reduce

    def allocate(self, size: _Size, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._then_all_reduce:  # which follows even where a copy is not divided; the hook after it ends the phase
            mark("communication")
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> Work | None:
        work = started(dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=True))
        return _begun(work, async_op=async_op)


def _begun(work: Work, *, async_op: bool) -> Work | None:
    """Return a collective that is to go on in the background; wait for any other."""
    if async_op:
        return _TimedWork(work)
    wait(work)
    return None


@final
class _TimedWork(Work):
    """A collective in the background, whose wait is measured, too."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: timedelta = _UNLIMITED) -> bool:
        wait(self._work)
        return True
