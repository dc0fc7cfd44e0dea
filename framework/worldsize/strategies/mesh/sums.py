"""Sums of the gradients of a pipeline's micro-batches: in torch's order, or in the fixed tree over logical ranks.

Where every pass gathers parameters from all parts of the data, all need equally many passes in a step. A part with one
micro-batch less than others first lets one pass through its stages for nothing: an idle pass.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from worldsize.collectives.ordered import Counter, Tree, sum_level
from worldsize.core import Reduction
from worldsize.strategies.buffer_mean import BufferMean, StepBuffers
from worldsize.strategies.gradient_reducer import taken
from worldsize.strategies.sharded_reducer import OrderedScatters


@final
@dataclass(frozen=True)
class DataParts:
    """The data-parallel parts: ``group`` has a rank of each, which all have the same stages.

    ``logical_ranks``: those of all parts, which may have different numbers of them; None: all have equally many.
    ``equal_passes``: all parts need equally many passes in a step.
    """

    group: ProcessGroup
    reduce: Reduction
    logical_ranks: int | None
    equal_passes: bool

    def tree(self, count: int) -> Tree:
        """Return the tree of a step in which this part has ``count`` micro-batches."""
        size = self.group.size()
        return Tree(self.logical_ranks or count * size, size)

    def idle(self, count: int) -> int:
        """Return how many idle passes come before those of this part's ``count`` micro-batches: 1 or 0."""
        if not self.equal_passes or self.logical_ranks is None:
            return 0
        return -(-self.logical_ranks // self.group.size()) - count

    def order(self, count: int) -> Sequence[int]:
        """Return in which order the ``count`` micro-batches of this part pass through the stages."""
        if self.reduce != "ordered":
            return range(count)
        tree = self.tree(count)
        return [leaf for node in range(tree.nodes_of(self.group.rank())) for leaf in tree.leaves(node)]

    def divisor(self, count: int) -> float:
        """Return by what the loss of each of ``count`` micro-batches is divided before its backward pass."""
        return 1.0 if self.reduce == "ordered" else self.tree(count).logical_ranks / self.group.size()

    def sums(self, stage: nn.Module) -> StageSums:
        """Return the sums of one stage, which is divided by now."""
        return TreeSums(stage, self) if self.reduce == "ordered" else FlatSums(stage, self)


class StageSums(ABC):
    """Adds up the gradients of the micro-batches that pass through one stage, without those of idle passes."""

    @abstractmethod
    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        """Compute a step of ``count`` micro-batches inside the context."""

    @abstractmethod
    def forwarded(self, place: int) -> None:
        """Record the forward pass of number ``place`` in this step, counted from 0 and with idle ones."""

    @abstractmethod
    def backwarded(self) -> None:
        """Take the gradients of the next backward pass; they come in the order of the forward passes."""


@final
class FlatSums(StageSums):
    """Leaves the sums to autograd and FSDP, and lets no idle pass change a buffer; the loss of such a pass is 0."""

    def __init__(self, stage: nn.Module, parts: DataParts) -> None:
        self._buffers, self._parts = list(stage.buffers()), parts
        self._first: list[Tensor] = []  # values of the buffers that the first pass of the step must not change

    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        self._first = [buffer.clone() for buffer in self._buffers] if self._parts.idle(count) else []
        yield

    def forwarded(self, place: int) -> None:
        for buffer, value in zip(self._buffers, self._first, strict=False):
            buffer.data.copy_(value)  # through .data, so that autograd's graph stays valid
        self._first = []

    def backwarded(self) -> None: ...


@final
class TreeSums(StageSums):
    """Sums in the fixed tree, with the same bits for any number of data-parallel parts."""

    def __init__(self, stage: nn.Module, parts: DataParts) -> None:
        self._stage, self._parts = stage, parts
        is_sharded = isinstance(stage, FSDPModule)
        self._scatters = OrderedScatters(stage, parts.group) if is_sharded else None
        group = parts.group if parts.group.size() > 1 else None
        self._buffers = BufferMean(stage, group, logical_ranks=parts.logical_ranks)
        self._step: StepBuffers | None = None  # the buffers in the step in progress
        self._order: Sequence[int] = ()
        self._counters: list[Counter] = []  # of the nodes of the tree that this rank has
        self._idle = self._taken = 0  # idle passes of the step, and backward passes so far

    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        tree = self._parts.tree(count)
        nodes = tree.nodes_of(self._parts.group.rank())
        self._order, self._counters = self._parts.order(count), [Counter() for _ in range(nodes)]
        self._idle, self._taken = self._parts.idle(count), 0
        self._begin_scatters(0 if self._idle else count)
        with self._buffers.step(count) as self._step:
            yield
        if self._scatters is None:
            self._finish_alone(tree.logical_ranks)
        self._step, self._counters = None, []  # releases gradients

    def forwarded(self, place: int) -> None:
        assert self._step is not None
        if place < self._idle:
            self._step.restore()
        else:
            self._step.add(self._order[place - self._idle])

    def backwarded(self) -> None:
        self._taken += 1
        done, count = self._taken - self._idle, len(self._order)
        if self._scatters is None:  # there is one part of the data, and no idle pass
            self._counters[(done - 1) // (count // len(self._counters))].add(taken(self._trained()))
            return
        assert isinstance(self._stage, FSDPModule)
        self._stage.set_requires_gradient_sync(True)
        self._stage.set_reshard_after_backward(False)
        for module in self._stage.modules():
            if isinstance(module, FSDPModule):
                _reduce(module, is_last=done == count)
        if done == 0:
            self._begin_scatters(count)  # the gradients until here were those of idle passes
        else:
            self._scatters.check(done)

    def _begin_scatters(self, micro_batches: int) -> None:
        """Let the next gradients count as those of so many micro-batches of the step; 0: as nothing."""
        if self._scatters:
            logical_ranks = self._parts.tree(len(self._order)).logical_ranks
            self._scatters.begin(len(self._counters), micro_batches, logical_ranks=logical_ranks)

    def _finish_alone(self, logical_ranks: int) -> None:
        sums = [counter.waiting[0] for counter in self._counters]
        for parameter, *nodes in zip(self._trained(), *sums, strict=True):
            total = sum_level(nodes) / logical_ranks
            parameter.grad = total if parameter.grad is None else parameter.grad + total  # another stage has it, too

    def _trained(self) -> list[nn.Parameter]:
        return [each for each in self._stage.parameters() if each.requires_grad]


def _reduce(module: FSDPModule, *, is_last: bool) -> None:
    """Reduce the gradients that a backward pass has left in a unit; only after the last pass there are shards."""
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group.post_backward()
        if not is_last:
            for parameter in group.fsdp_params:
                parameter.sharded_param.grad = None  # zeros
