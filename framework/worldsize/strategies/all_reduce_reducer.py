"""Mean gradients by an all-reduce: torch's own, or that of a DDP communication hook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from worldsize.core import MicroBatch, StateDict
from worldsize.dist.gathered import gathered_mean
from worldsize.strategies.gradient_reducer import Backward, GradientReducer, without_sync
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.step_buffers import BufferMean
from worldsize.strategies.unused_parameters import check_reduced


class BucketHook(ABC):
    """Sums a bucket of DDP's gradients over processes, and may keep state for each bucket until the next step."""

    @property
    def has_bucket_memory(self) -> bool:
        """Whether the hook keeps state for each bucket, so that DDP must form its buckets before the first step."""
        return False

    def begin(self, step: int) -> None:  # noqa: B027 - most sum in each step alike
        """Prepare to sum the gradients of ``step``, counted from 1."""

    @abstractmethod
    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Return the mean over processes of the bucket's buffer, of the same shape (n,)."""

    def settle(self, discarded_pass: Callable[[], None]) -> None:
        """Run ``discarded_pass``, after which DDP has its final buckets, and lay out the state of each bucket."""
        discarded_pass()

    def state(self) -> StateDict:
        """Return the state that is kept between steps."""
        return {}

    def load(self, state: StateDict) -> None:  # noqa: B027 - most remember nothing
        """Load what :meth:`state` returned."""


@final
class GatherHook(BucketHook):
    """Gathers buckets and sums them everywhere, see :mod:`worldsize.dist.gathered`: for small models on CPUs."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Return the mean of the bucket's buffer (n,). Waiting here costs nothing: there is no work left to overlap."""
        future: Future[Tensor] = Future()
        future.set_result(gathered_mean(bucket.buffer(), self._group))
        return future


@final
class AllReduceReducer(GradientReducer):
    """Sums micro-batches in order, and across processes by torch's all-reduce or by ``hook``.

    ``module`` is a model, or the DistributedDataParallel around it; only the latter can have a ``hook``.
    ``logical_ranks``: those of all processes, which may have different numbers of them; None: all have as many as this
    one.
    """

    def __init__(self, module: nn.Module, hook: BucketHook | None = None, *, logical_ranks: int | None = None) -> None:
        self._module, self._hook, self._logical_ranks = module, hook, logical_ranks
        group = module.process_group if isinstance(module, DistributedDataParallel) else None
        self._size = dist.get_world_size(group) if group else 1
        self._buffers = BufferMean(module, group, logical_ranks=logical_ranks)
        self._is_settled = hook is None or not hook.has_bucket_memory
        if hook is not None:
            assert isinstance(module, DistributedDataParallel)
            module.register_comm_hook(None, lambda _, bucket: hook.reduce(bucket))

    def resumed(self) -> None:
        self._is_settled = not isinstance(self._module, DistributedDataParallel)

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        if self._hook is not None:
            self._hook.begin(batches[0].step)
        if not self._is_settled:
            self._settle(partial(backward, batches[-1]))
        losses, scale = [], self._size / (self._logical_ranks or len(batches) * self._size)
        with self._buffers.step(len(batches)) as buffers:
            with without_sync(self._module):
                for place, batch in enumerate(batches[:-1]):
                    losses.append(backward(batch, scale))
                    buffers.add(place)
            losses.append(backward(batches[-1], scale))
            buffers.add(len(batches) - 1)
            check_reduced(self._module)
        return losses

    def undo(self) -> None:
        self._buffers.undo()

    def commit(self) -> None:
        self._buffers.commit()

    def _settle(self, backward: Callable[[float], LossRecord]) -> None:
        """Let DDP rebuild its buckets, as it does after its first pass.

        With three or more ranks the order of sums depends on the buckets.
        """
        self._is_settled = True
        discarded_pass = partial(self._discard, backward)
        if self._hook is None:
            discarded_pass()
        else:
            self._hook.settle(discarded_pass)

    def _discard(self, backward: Callable[[float], LossRecord]) -> None:
        """Run a pass whose gradients are discarded."""
        kept = self._buffers.kept()
        try:
            backward(0.0)
            check_reduced(self._module)
        finally:  # also where a peer is lost in it
            kept.restore()
        self._module.zero_grad()

    def state(self) -> StateDict:
        return {} if self._hook is None else self._hook.state()

    def load(self, state: StateDict) -> None:
        if self._hook is not None:
            self._hook.load(state)
