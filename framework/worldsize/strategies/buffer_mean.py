"""Averages buffers that training changes, such as BatchNorm's statistics, over logical ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        """Add the change made by the forward pass of this micro-batch, and restore the values of the step's start."""

    @abstractmethod
    def finish(self) -> None:
        """Write the mean into the buffers, after the last micro-batch of the step."""

    @abstractmethod
    def restore(self) -> None:
        """Restore the values of the step's start, after a step that was interrupted."""


@final
class BufferMean:
    """Averages buffers that training changes, such as BatchNorm's, over logical ranks, in the fixed tree of sums.

    Each micro-batch starts from the values at the start of the step, and the changes are averaged, so that an unchanged
    buffer keeps its bits. Integers, such as BatchNorm's count of batches, end with their values after one micro-batch:
    a step counts once.

    ``logical_ranks``: those of all processes, which may have different numbers of them; None: all have as many as this
    one.
    """

    def __init__(
        self,
        module: nn.Module,
        group: ProcessGroup | None,
        dealing: Dealing = "cyclic",
        *,
        logical_ranks: int | None = None,
    ) -> None:
        own = module.module if isinstance(module, DistributedDataParallel) else module
        kept = own.state_dict().keys()
        changing = [buffer for name, buffer in own.named_buffers() if name in kept]
        self._buffers = [buffer for buffer in changing if buffer.is_floating_point()]
        self._integers = [buffer for buffer in changing if not buffer.is_floating_point()]
        self._group = group
        self._rank, self._size = (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        self._dealing, self._logical_ranks = dealing, logical_ranks

    @contextmanager
    def step(self, batches: int) -> Iterator[StepBuffers]:
        """Average the buffers over the step inside the context; an error leaves them as they were before."""
        buffers = self.begin(batches)
        try:
            yield buffers
            buffers.finish()
        except BaseException:
            buffers.restore()
            raise

    def begin(self, batches: int) -> StepBuffers:
        """Begin a step of ``batches`` micro-batches on this rank."""
        logical_ranks = self._logical_ranks or batches * self._size
        if logical_ranks == 1 or not self._buffers:
            return _UNTOUCHED
        if self._dealing == "block":
            nodes, total = {batch: batch for batch in range(batches)}, logical_ranks
        else:
            tree = Tree(logical_ranks, self._size)
            nodes = {leaf: node for node in range(tree.nodes_of(self._rank)) for leaf in tree.leaves(node)}
            total = tree.nodes
        return _AveragedBuffers(self._buffers, self._integers, nodes, partial(self._mean, logical_ranks, total))

    def _mean(self, logical_ranks: int, nodes: int, rows: Sequence[Tensor]) -> Tensor:
        """Sum the ``nodes`` of all processes, of which ``rows`` are this one's, and divide by the logical ranks."""
        if self._group is None:
            return sum_level(rows) / logical_ranks
        return finished(reduce_ordered(rows, self._group, self._dealing, nodes=nodes)) / logical_ranks


@final
class _UntouchedBuffers(StepBuffers):
    """Buffers that need no averaging and keep the values of the forward pass."""

    def add(self, batch: int) -> None: ...

    def finish(self) -> None: ...

    def restore(self) -> None: ...


_UNTOUCHED = _UntouchedBuffers()


@final
class _AveragedBuffers(StepBuffers):
    """Buffers averaged over the step; micro-batch ``batch`` is part of the local sum ``nodes[batch]``."""

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

    def restore(self) -> None:
        _copy((*self._buffers, *self._integers), self._first)


def _change(now: Tensor, first: Tensor) -> Tensor:
    """Return the difference from ``first``; where ``first`` is infinite, return the new value itself."""
    return torch.where(now == first, 0, now - first.nan_to_num(0, 0, 0))


def _changed(first: Tensor, change: Tensor) -> Tensor:
    change = change.view_as(first)
    return torch.where(change == 0, first, first.nan_to_num(0, 0, 0) + change)


def _copy(buffers: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.data.copy_(value)  # through .data, since a new version of the tensor would invalidate autograd's graph
