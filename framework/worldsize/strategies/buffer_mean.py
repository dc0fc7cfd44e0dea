"""Means over logical ranks of the buffers that training changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from worldsize.collectives.ordered import Counter, Tree, reduce_ordered, sum_level
from worldsize.collectives.staged import finished
from worldsize.core import Dealing


class StepBuffers(ABC):
    """The buffers of a model during one step."""

    @abstractmethod
    def add(self, batch: int) -> None:
        """Take what the forward pass of this micro-batch has changed, and go back to the step's beginning."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the mean in the buffers, after the step's last micro-batch."""


@final
class BufferMean:
    """Averages buffers that training changes, such as BatchNorm's, over logical ranks, in the fixed tree of sums.

    Each micro-batch starts from the values with which the step began, and what it adds to them is averaged, so that
    a buffer that nothing changes keeps its bits. Integers, such as BatchNorm's count of batches, end as they are
    after one micro-batch: a step counts once.
    """

    def __init__(self, module: nn.Module, group: ProcessGroup | None, dealing: Dealing = "cyclic") -> None:
        own = module.module if isinstance(module, DistributedDataParallel) else module
        kept = own.state_dict().keys()
        changing = [buffer for name, buffer in own.named_buffers() if name in kept]
        self._buffers = [buffer for buffer in changing if buffer.is_floating_point()]
        self._integers = [buffer for buffer in changing if not buffer.is_floating_point()]
        self._group, self._size = group, dist.get_world_size(group) if group else 1
        self._dealing = dealing

    def begin(self, batches: int) -> StepBuffers:
        """Begin a step of so many micro-batches on each rank."""
        logical_ranks = batches * self._size
        if logical_ranks == 1 or not self._buffers:
            return _UNTOUCHED
        if self._dealing == "block":
            nodes = {batch: batch for batch in range(batches)}
        else:
            tree = Tree(logical_ranks, self._size)
            nodes = {leaf: node for node in range(tree.local_nodes) for leaf in tree.leaves(node)}
        return _AveragedBuffers(self._buffers, self._integers, nodes, partial(self._mean, logical_ranks))

    def _mean(self, logical_ranks: int, rows: Sequence[Tensor]) -> Tensor:
        """Add up the nodes of all processes, flat, and divide by the number of logical ranks."""
        total = finished(reduce_ordered(rows, self._group, self._dealing)) if self._group else sum_level(rows)
        return total / logical_ranks


@final
class _UntouchedBuffers(StepBuffers):
    """Buffers of which there is nothing to average: they stay as the forward pass leaves them."""

    def add(self, batch: int) -> None: ...

    def finish(self) -> None: ...


_UNTOUCHED = _UntouchedBuffers()


@final
class _AveragedBuffers(StepBuffers):
    """Averaged over the step; micro-batch ``batch`` is part of the local sum ``nodes[batch]``."""

    def __init__(
        self,
        buffers: Sequence[Tensor],
        integers: Sequence[Tensor],
        nodes: Mapping[int, int],
        mean: Callable[[Sequence[Tensor]], Tensor],
    ) -> None:
        self._buffers, self._integers, self._node, self._mean = buffers, integers, nodes, mean
        self._counters = [Counter() for _ in set(nodes.values())]
        self._first = [buffer.clone() for buffer in (*buffers, *integers)]
        self._counted: Sequence[Tensor] = ()

    def add(self, batch: int) -> None:
        pairs = zip(self._buffers, self._first, strict=False)
        self._counters[self._node[batch]].add([_change(*pair) for pair in pairs])
        self._counted = [integer.clone() for integer in self._integers]
        _copy((*self._buffers, *self._integers), self._first)

    def finish(self) -> None:
        rows = [torch.cat([total.flatten() for total in counter.waiting[0]]) for counter in self._counters]
        parts = torch.split(self._mean(rows), [buffer.numel() for buffer in self._buffers])
        changed = (_changed(*pair) for pair in zip(self._buffers, parts, strict=True))
        _copy((*self._buffers, *self._integers), (*changed, *self._counted))


def _change(now: Tensor, first: Tensor) -> Tensor:
    """Return what is to be added; nothing can be added to an infinity, so there it is the new value itself."""
    return torch.where(now == first, 0, now - first.nan_to_num(0, 0, 0))


def _changed(first: Tensor, change: Tensor) -> Tensor:
    change = change.view_as(first)
    return torch.where(change == 0, first, first.nan_to_num(0, 0, 0) + change)


def _copy(buffers: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)  # no new version: as the forward pass that changed it, it invalidates no graph
