"""From the micro-batches of a step to one mean gradient: added up as they come, or in the tree of logical ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from worldsize.collectives.gathered import gathered_mean, is_small
from worldsize.collectives.ordered import Counter, Tree, finish, reduce_ordered
from worldsize.collectives.staged import Phases, Staged, finished
from worldsize.core import MicroBatch, Reduction, StateDict

Backward = Callable[[MicroBatch, float], Tensor]


class GradientReducer(ABC):
    """Runs the backward passes of a step and leaves the mean gradient of all logical ranks in ``.grad``."""

    @abstractmethod
    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[Tensor]:
        """Losses in the order of ``batches``; ``backward(batch, scale)`` adds a scaled gradient to ``.grad``."""

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients so that their norm is at most ``limit``; the norm before, over all parameters."""
        return nn.utils.clip_grad_norm_(parameters, limit)

    def state(self) -> StateDict:
        """What these sums remember from step to step; per rank, so that only the same world size can use it."""
        return {}

    def load(self, state: StateDict) -> None:  # noqa: B027
        """What :meth:`state` gave, after :meth:`resumed`."""

    def resumed(self) -> None:  # noqa: B027 - most sums do not depend on what came before
        """The next step goes on where another process stopped, and has to sum as that one would have."""


def gradient_reducer(reduce: Reduction, module: nn.Module, group: ProcessGroup | None) -> GradientReducer:
    """For ``module``: a model, or the DistributedDataParallel around it with its ``group``."""
    if reduce == "ordered":
        return Ordered(module, group)
    if group and isinstance(module, DistributedDataParallel) and is_small(module, dist.get_world_size(group)):
        module.register_comm_hook(None, lambda _, bucket: _gathered(bucket.buffer(), group))
    return Flat(module)


def taken(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """The gradients of one micro-batch, zeros where there is none, and none left behind."""
    gradients = []
    for parameter in parameters:
        gradients.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        parameter.grad = None
    return gradients


def _no_sync(module: nn.Module) -> AbstractContextManager[None]:
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def _gathered(bucket_n: Tensor, group: ProcessGroup) -> Future[Tensor]:
    """For DDP's communication hook; that it waits costs nothing, since there is nothing left to overlap with."""
    future: Future[Tensor] = Future()
    future.set_result(gathered_mean(bucket_n, group))
    return future


class Flat(GradientReducer):
    """Torch's own sums: in the order of arrival here, in the collective's order across processes.

    The gradients of a small model on CPUs are gathered instead, see :mod:`worldsize.collectives.gathered`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        group = module.process_group if isinstance(module, DistributedDataParallel) else None
        self._statistics = Statistics(module, group)
        self._settled = True

    def resumed(self) -> None:
        self._settled = not isinstance(self._module, DistributedDataParallel)

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[Tensor]:
        if not self._settled:
            self._settle(partial(backward, batches[-1]))
        self._statistics.begin(len(batches))
        with _no_sync(self._module):
            losses = [self._added(place, batches, backward) for place in range(len(batches) - 1)]
        losses.append(self._added(len(batches) - 1, batches, backward))
        self._statistics.finish()
        return losses

    def _added(self, place: int, batches: Sequence[MicroBatch], backward: Backward) -> Tensor:
        loss = backward(batches[place], 1 / len(batches))
        self._statistics.add(place)
        return loss

    def _settle(self, backward: Callable[[float], Tensor]) -> None:
        """A pass whose gradients are thrown away: DDP groups its buckets anew after its first one, and how they are
        grouped decides the order of sums at three ranks and more.
        """
        self._settled = True
        kept = [buffer.clone() for buffer in self._module.buffers()]
        backward(1.0)
        self._module.zero_grad()
        for buffer, before in zip(self._module.buffers(), kept, strict=True):
            buffer.copy_(before)


@final
class Ordered(GradientReducer):
    """The fixed tree of :mod:`worldsize.collectives.ordered`: every world size computes the same bits.

    Across processes it is a communication hook: buckets are exchanged while the last backward pass runs.
    Which parameters share a bucket does not matter, since each element is summed by itself.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None) -> None:
        self._module = module
        self._group = group
        self._size = dist.get_world_size(group) if group else 1
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._place = {id(parameter): place for place, parameter in enumerate(self._parameters)}
        self._statistics = Statistics(module, group)
        self._counters: list[Counter] = []
        self._staged = Staged()
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[Tensor]:
        tree = Tree(len(batches) * self._size, self._size)
        self._logical_ranks, losses = tree.logical_ranks, dict[int, Tensor]()
        self._counters = [Counter() for _ in range(tree.local_nodes)]
        self._statistics.begin(len(batches))
        *early, last = [(node, leaf) for node in range(tree.local_nodes) for leaf in tree.leaves(node)]
        with _no_sync(self._module):
            for node, leaf in early:
                losses[leaf] = backward(batches[leaf], 1.0)
                self._counters[node].add(taken(self._parameters))
                self._statistics.add(leaf)
        losses[last[1]] = backward(batches[last[1]], 1.0)  # runs the hook, if there is one
        self._statistics.add(last[1])
        if self._group is None:
            self._finish_alone(last[0])
        self._statistics.finish()
        self._counters = []  # they hold gradients
        return [losses[leaf] for leaf in range(len(batches))]

    def _finish_alone(self, node: int) -> None:
        self._counters[node].add(taken(self._parameters))
        sums = [counter.waiting[0] for counter in self._counters]
        for parameter, *nodes in zip(self._parameters, *sums, strict=True):
            parameter.grad = finish(nodes) / self._logical_ranks

    def _reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook."""
        return self._staged.add(bucket.buffer(), self._mean(bucket), last=bucket.is_last())

    def _mean(self, bucket: GradBucket) -> Phases:
        assert self._group is not None
        total = yield from reduce_ordered(self._rows(bucket), self._group)
        return torch.div(total, self._logical_ranks, out=bucket.buffer())

    def _rows(self, bucket: GradBucket) -> list[Tensor]:
        """This process's nodes for the bucket's parameters, flat; the bucket itself holds the last leaf."""
        places = [self._place[id(parameter)] for parameter in bucket.parameters()]
        *complete, current = self._counters
        for waiting in current.waiting:
            for gradient, place in zip(bucket.gradients(), places, strict=True):
                gradient.add_(waiting[place])
        sums = [counter.waiting[0] for counter in complete]
        return [*(torch.cat([total[place].flatten() for place in places]) for total in sums), bucket.buffer()]


@final
class Statistics:
    """Buffers that training changes, such as BatchNorm's: the mean over logical ranks, in the same tree.

    Each micro-batch starts from the values with which the step began, and what it adds to them is averaged, so that
    a buffer that nothing changes keeps its bits. Integers, such as BatchNorm's count of batches, end as they are
    after one micro-batch: a step counts once.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None) -> None:
        own = module.module if isinstance(module, DistributedDataParallel) else module
        kept = own.state_dict().keys()
        changing = [buffer for name, buffer in own.named_buffers() if name in kept]
        self._buffers = [buffer for buffer in changing if buffer.is_floating_point()]
        self._integers = [buffer for buffer in changing if not buffer.is_floating_point()]
        self._group, self._size = group, dist.get_world_size(group) if group else 1

    def begin(self, batches: int) -> None:
        """A step of so many micro-batches on each rank."""
        self._logical_ranks = batches * self._size
        if not self._is_averaged():
            return
        tree = Tree(self._logical_ranks, self._size)
        self._node = {leaf: node for node in range(tree.local_nodes) for leaf in tree.leaves(node)}
        self._counters = [Counter() for _ in range(tree.local_nodes)]
        self._first = [buffer.clone() for buffer in (*self._buffers, *self._integers)]

    def _is_averaged(self) -> bool:
        return len(self._buffers) > 0 and self._logical_ranks > 1

    def add(self, batch: int) -> None:
        """After the forward pass of this one: take what it has changed, and go back to the step's beginning."""
        if not self._is_averaged():
            return
        pairs = zip(self._buffers, self._first, strict=False)
        self._counters[self._node[batch]].add([_change(*pair) for pair in pairs])
        self._counted = [integer.clone() for integer in self._integers]
        _copy((*self._buffers, *self._integers), self._first)

    def finish(self) -> None:
        if not self._is_averaged():
            return
        rows = [torch.cat([total.flatten() for total in counter.waiting[0]]) for counter in self._counters]
        whole = finished(reduce_ordered(rows, self._group)) if self._group else finish(rows)
        parts = torch.split(whole / self._logical_ranks, [buffer.numel() for buffer in self._buffers])
        changed = (_changed(*pair) for pair in zip(self._buffers, parts, strict=True))
        _copy((*self._buffers, *self._integers), (*changed, *self._counted))


def _change(now: Tensor, first: Tensor) -> Tensor:
    """What is to be added; to an infinity nothing can be, so that there it is what has come instead."""
    return torch.where(now == first, 0, now - first.nan_to_num(0, 0, 0))


def _changed(first: Tensor, change: Tensor) -> Tensor:
    change = change.view_as(first)
    return torch.where(change == 0, first, first.nan_to_num(0, 0, 0) + change)


def _copy(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)
