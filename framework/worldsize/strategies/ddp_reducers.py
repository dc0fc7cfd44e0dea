"""Reducers for the gradients of unsharded models: all-reduce, or fixed-tree sums.

The all-reduce is torch's own or a DDP communication hook. Fixed-tree sums have the same bits at any world size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import final
from weakref import proxy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from worldsize.collectives.ordered import Counter, Tree, gather_mean, reduce_ordered, sum_level
from worldsize.collectives.staged import Phases, Staged
from worldsize.core import MicroBatch, StateDict
from worldsize.record.operations import pause_recording
from worldsize.strategies.gradient_reducer import (
    Backward,
    GradientReducer,
    Observe,
    Presence,
    check_reduced,
    disable_sync,
    finds_unused,
    observe_parameters,
    pop_gradients,
    set_gradients_aside,
)
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.step_buffers import BufferMean


class BucketHook(ABC):
    """Abstract base: averages DDP's gradient buckets over processes, optionally with state."""

    @property
    def has_bucket_memory(self) -> bool:
        """Whether each bucket has state, so that DDP must form its buckets before the first step."""
        return False

    def begin_step(self, step: int) -> None:  # noqa: B027 - most sum the same way in each step
        """Prepare for the gradients of ``step``, counted from 1."""

    @abstractmethod
    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Return the mean of the bucket's buffer (n,) over processes, of the same shape."""

    def prepare_buckets(self, discarded_pass: Callable[[], None]) -> None:
        """Run ``discarded_pass`` so that DDP finalizes its buckets, and create their state."""
        discarded_pass()

    def state(self) -> StateDict:
        """Return the state that persists between steps."""
        return {}

    def load(self, state: StateDict) -> None:  # noqa: B027 - most are stateless
        """Load what :meth:`state` returned."""


@final
class GatherHook(BucketHook):
    """Gathers each bucket and averages it on every rank, for small models on CPUs."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """Return the mean of the bucket's buffer (n,). Blocks, since there is little to overlap."""
        future: Future[Tensor] = Future()
        future.set_result(gather_mean(bucket.buffer(), self._group))
        return future


@final
class AllReduceReducer(GradientReducer):
    """Sums micro-batches in order, then over processes with torch's all-reduce or ``hook``.

    ``module`` is a model or its DistributedDataParallel; ``hook`` requires the latter. ``logical_ranks``: total over
    all processes, if their shares may differ; None if all have as many as this one.
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

    def on_resume(self) -> None:
        self._is_settled = not isinstance(self._module, DistributedDataParallel)

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        if self._hook is not None:
            self._hook.begin_step(batches[0].step)
        if not self._is_settled:
            self._rebuild_buckets(partial(backward, batches[-1]))
        losses, scale = [], self._size / (self._logical_ranks or len(batches) * self._size)
        with self._buffers.step(len(batches)) as buffers:
            with disable_sync(self._module):
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

    def _rebuild_buckets(self, backward: Callable[[float], LossRecord]) -> None:
        """Make DDP rebuild its buckets now instead of after its first pass.

        With three or more ranks, the order of sums depends on the buckets, so a resumed run needs the final ones.
        """
        self._is_settled = True
        discarded_pass = partial(self._run_discarded_pass, backward)
        if self._hook is None:
            discarded_pass()
        else:
            self._hook.prepare_buckets(discarded_pass)

    def _run_discarded_pass(self, backward: Callable[[float], LossRecord]) -> None:
        """Run a pass and discard its gradients and buffer changes."""
        with pause_recording():
            kept = self._buffers.snapshot_buffers()
            try:
                backward(0.0)
                check_reduced(self._module)
            finally:  # also if a peer dies during the pass
                kept.restore()
            self._module.zero_grad()

    def state(self) -> StateDict:
        return {} if self._hook is None else self._hook.state()

    def load(self, state: StateDict) -> None:
        if self._hook is not None:
            self._hook.load(state)


@final
class OrderedReducer(GradientReducer):
    """Fixed-tree sums (:mod:`worldsize.collectives.ordered`): same bits at every world size.

    Over processes, a communication hook exchanges DDP's buckets during the last backward pass. The assignment of
    parameters to buckets does not affect results, since each element is summed separately.

    ``logical_ranks``: total over all processes, if their shares may differ; None if all have as many as this one.
    """

    @property
    def is_ordered(self) -> bool:
        return True

    def __init__(self, module: nn.Module, group: ProcessGroup | None, logical_ranks: int | None = None) -> None:
        self._module = module
        self._group = group
        self._rank, self._size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        self._wanted = logical_ranks
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._place = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._buffers = BufferMean(module, group, logical_ranks=logical_ranks)
        self._counters: list[Counter] = []
        self._presence = Presence(self._parameters)  # gradients in the current step
        self._tree = Tree(self._size, self._size)
        if isinstance(module, DistributedDataParallel):
            self._staged = Staged(self._parameters[0].device)
            own = proxy(self)  # DDP holds the hook in C++, where the garbage collector cannot detect cycles
            module.register_comm_hook(None, lambda _, bucket: own._reduce_gradients(bucket))

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        self._tree = tree = Tree(self._wanted or len(batches) * self._size, self._size)
        nodes, losses = range(tree.count_nodes(self._rank)), dict[int, LossRecord]()
        self._counters, self._presence = [Counter() for _ in nodes], Presence(self._parameters)
        *early, last = [(node, leaf) for node in nodes for leaf in tree.list_leaves(node)]
        with self._buffers.step(len(batches)) as buffers:
            with disable_sync(self._module):
                for node, leaf in early:
                    losses[leaf] = backward(batches[leaf], 1.0)
                    self._collect_gradients(node)
                    buffers.add(leaf)
            self._hold_places()
            losses[last[1]] = backward(batches[last[1]], 1.0)  # also runs the communication hook, if any
            buffers.add(last[1])
            if self._group is None:
                self._finish_alone(last[0])
            check_reduced(self._module)
        self._counters = []  # release gradients
        return [losses[leaf] for leaf in range(len(batches))]

    def run_apart(self, batch: MicroBatch, backward: Backward) -> LossRecord:
        kept = self._buffers.snapshot_buffers()
        with set_gradients_aside(list(self._module.parameters())), disable_sync(self._module):
            try:
                return backward(batch, 1.0)
            finally:
                kept.restore()

    def observe_gradients(self, observe: Observe) -> AbstractContextManager[None]:
        model = self._module.module.model if isinstance(self._module, DistributedDataParallel) else self._module
        return observe_parameters(model.named_parameters(), observe)

    def undo(self) -> None:
        self._buffers.undo()

    def commit(self) -> None:
        self._buffers.commit()

    def _hold_places(self) -> None:
        """Give parameters used earlier in the step a gradient of -0.0, if DDP finds unused ones.

        DDP requires a gradient in the last pass for each parameter used earlier. Adding to -0.0 keeps the bits.
        """
        if not finds_unused(self._module):
            return
        for index, parameter in enumerate(self._parameters):
            if index not in self._presence.absent:
                parameter.grad = torch.full_like(parameter, -0.0)

    def _collect_gradients(self, node: int) -> None:
        if self._group is None and not any(counter.waiting for counter in self._counters):
            # in a single process, the loss may freeze and unfreeze parameters
            self._parameters = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
            self._presence = Presence(self._parameters)
        self._presence.record_gradients()
        self._counters[node].add(pop_gradients(self._parameters))

    def _finish_alone(self, node: int) -> None:
        self._collect_gradients(node)
        sums = [counter.waiting[0] for counter in self._counters]
        for index, (parameter, *nodes) in enumerate(zip(self._parameters, *sums, strict=True)):
            if index not in self._presence.absent:
                parameter.grad = sum_level(nodes) / self._tree.logical_ranks

    def _reduce_gradients(self, bucket: GradBucket) -> Future[Tensor]:
        """Reduce a bucket, as DDP's communication hook."""
        return self._staged.add(bucket.buffer(), self._average_bucket(bucket), last=bucket.is_last())

    def _average_bucket(self, bucket: GradBucket) -> Phases:
        assert self._group is not None
        total = yield from reduce_ordered(self._collect_nodes(bucket), self._group, nodes=self._tree.nodes)
        return torch.div(total, self._tree.logical_ranks, out=bucket.buffer())

    def _collect_nodes(self, bucket: GradBucket) -> list[Tensor]:
        """Return this process's tree nodes for a bucket, each (n,).

        The bucket contains the gradients of the last leaf.
        """
        places = [self._place[id(parameter)] for parameter in bucket.parameters()]
        *complete, current = self._counters
        for waiting in current.waiting:
            if waiting[places[0]].is_complex():  # bucket.gradients() lacks complex support
                bucket.buffer().add_(torch.cat([_view_as_real(waiting[place]).flatten() for place in places]))
                continue
            torch._foreach_add_(bucket.gradients(), [waiting[place] for place in places])
        sums = [counter.waiting[0] for counter in complete]
        return [
            *(torch.cat([_view_as_real(total[place]).flatten() for place in places]) for total in sums),
            bucket.buffer(),
        ]


def _view_as_real(gradient: Tensor) -> Tensor:
    """View a complex tensor (...) as real (..., 2), as in DDP's buckets; return others as is."""
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
