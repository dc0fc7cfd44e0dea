"""Torch's PowerSGD hook (Vogels et al. 2019, arXiv 1905.13727), with its memory saved in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from worldsize.core import StateDict, World
from worldsize.dist.per_rank import local_row, stack_per_rank
from worldsize.dist.step_timer import phase
from worldsize.strategies.all_reduce_reducer import BucketHook
from worldsize.strategies.tiers import Tiers

_WARM_UP = 2  # passes before torch's hook compresses; they are discarded


@final
class PowerSGDHook(BucketHook):
    """Sends each gradient matrix as the product of two factors of ``rank`` columns, with error feedback and warm start.

    With ``tiers``, only sums of the last tier are compressed; the others, such as those inside a node, are exact.
    """

    def __init__(self, module: DistributedDataParallel, world: World, *, rank: int, tiers: Tiers | None) -> None:
        self._world, self._rank, self._tiers = world, rank, tiers
        self._loaded: Tensor | None = None
        self._length = sum(
            parameter.numel() + _columns(parameter, rank)
            for parameter in module.parameters()
            if parameter.requires_grad
        )
        self._torch = self._fresh()

    @property
    def has_bucket_memory(self) -> bool:
        return True

    def _fresh(self) -> PowerSGDState:
        group = self._tiers.across if self._tiers else self._world.group
        return PowerSGDState(group, self._rank, start_powerSGD_iter=_WARM_UP, orthogonalization_epsilon=1e-8)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        for group in self._tiers.inner if self._tiers else ():
            bucket.buffer().div_(dist.get_world_size(group))
            with phase("communication"):
                dist.all_reduce(bucket.buffer(), group=group)
        future: Future[Tensor] = powerSGD_hook(self._torch, bucket)
        if bucket.buffer().device.type == "cpu":
            with phase("communication"):
                future.wait()  # it starts collectives in callbacks, which must not interleave with the next bucket's
        return future

    def settle(self, discarded_pass: Callable[[], None]) -> None:
        self._torch = self._fresh()
        for _ in range(_WARM_UP + 1):  # the last pass lays out the memory
            discarded_pass()
        layout, self._torch = self._torch, self._fresh()
        self._torch.iter = _WARM_UP
        if self._loaded is not None:
            self._restore(self._loaded, layout)
            self._loaded = None

    def _restore(self, memory: Tensor, layout: PowerSGDState) -> None:
        memory = memory.clone()
        for bucket in sorted(layout.error_dict):
            self._torch.error_dict[bucket], memory = _cut(memory, layout.error_dict[bucket])
        for bucket in sorted(layout.q_memory_dict):
            self._torch.q_memory_dict[bucket], memory = _cut(memory, layout.q_memory_dict[bucket])
        self._torch.p_memory_dict = layout.p_memory_dict  # recomputed in each step

    def state(self) -> StateDict:
        """Return the errors of all buckets, then the right factors with which the next step begins."""
        if self._loaded is not None:
            return {"memory": stack_per_rank(self._loaded, self._world)}
        memories = (self._torch.error_dict, self._torch.q_memory_dict)
        parts = [memory[bucket] for memory in memories for bucket in sorted(memory)]
        rest = torch.zeros(self._length - sum(part.numel() for part in parts), device=self._world.device)
        return {"memory": stack_per_rank(torch.cat([*parts, rest]), self._world)}

    def load(self, state: StateDict) -> None:
        memory = local_row(state["memory"])
        self._loaded = memory if memory.any() else None  # all zeros: the run had not begun


def _cut(memory: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    return memory[: like.numel()], memory[like.numel() :]


def _columns(parameter: Tensor, rank: int) -> int:
    """Return the largest number of elements of the matrix's right factor."""
    return 0 if parameter.ndim < 2 else parameter[0].numel() * min(rank, *parameter.flatten(1).shape)
