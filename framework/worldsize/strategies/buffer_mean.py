"""Means over logical ranks of the buffers that training changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from worldsize.collectives.ordered import Counter, Tree, finish, reduce_ordered
from worldsize.collectives.staged import finished


@final
class BufferMean:
    """Averages buffers that training changes, such as BatchNorm's, over logical ranks, in the fixed tree of sums.

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
        self._logical_ranks = self._size
        self._node: dict[int, int] = {}
        self._counters: list[Counter] = []
        self._first: list[Tensor] = []
        self._counted: list[Tensor] = []

    def begin(self, batches: int) -> None:
        """Begin a step of so many micro-batches on each rank."""
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
        """Take what the forward pass of this micro-batch has changed, and go back to the step's beginning."""
        if not self._is_averaged():
            return
        pairs = zip(self._buffers, self._first, strict=False)
        self._counters[self._node[batch]].add([_change(*pair) for pair in pairs])
        self._counted = [integer.clone() for integer in self._integers]
        _copy((*self._buffers, *self._integers), self._first)

    def finish(self) -> None:
        """Leave the mean in the buffers, after the step's last micro-batch."""
        if not self._is_averaged():
            return
        rows = [torch.cat([total.flatten() for total in counter.waiting[0]]) for counter in self._counters]
        whole = finished(reduce_ordered(rows, self._group)) if self._group else finish(rows)
        parts = torch.split(whole / self._logical_ranks, [buffer.numel() for buffer in self._buffers])
        changed = (_changed(*pair) for pair in zip(self._buffers, parts, strict=True))
        _copy((*self._buffers, *self._integers), (*changed, *self._counted))


def _change(now: Tensor, first: Tensor) -> Tensor:
    """Return what is to be added; nothing can be added to an infinity, so there it is the new value itself."""
    return torch.where(now == first, 0, now - first.nan_to_num(0, 0, 0))


def _changed(first: Tensor, change: Tensor) -> Tensor:
    change = change.view_as(first)
    return torch.where(change == 0, first, first.nan_to_num(0, 0, 0) + change)


def _copy(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value)
