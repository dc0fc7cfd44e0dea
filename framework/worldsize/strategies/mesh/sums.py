"""Sums of the gradients of a pipeline's micro-batches: in torch's order, or in the fixed tree over logical ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from torch import nn
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
    """

    group: ProcessGroup
    reduce: Reduction
    logical_ranks: int | None

    def tree(self, count: int) -> Tree:
        """Return the tree of a step in which this part has ``count`` micro-batches."""
        size = self.group.size()
        return Tree(self.logical_ranks or count * size, size)

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
        return TreeSums(stage, self) if self.reduce == "ordered" else FlatSums()


class StageSums(ABC):
    """Adds up the gradients of the micro-batches that pass through one stage."""

    @abstractmethod
    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        """Compute a step of ``count`` micro-batches inside the context."""

    @abstractmethod
    def forwarded(self, place: int) -> None:
        """Record the forward pass of the micro-batch at ``place`` of the order."""

    @abstractmethod
    def backwarded(self) -> None:
        """Take the gradients of the backward pass of the next micro-batch."""


@final
class FlatSums(StageSums):
    """Leaves the sums to autograd and FSDP."""

    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        yield

    def forwarded(self, place: int) -> None: ...

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
        self._taken = 0  # micro-batches of the step

    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        tree = self._parts.tree(count)
        nodes = tree.nodes_of(self._parts.group.rank())
        self._order, self._counters, self._taken = self._parts.order(count), [Counter() for _ in range(nodes)], 0
        if self._scatters:
            self._scatters.begin(nodes, count, logical_ranks=tree.logical_ranks)
        with self._buffers.step(count) as self._step:
            yield
        if self._scatters is None:
            self._finish_alone(tree.logical_ranks)
        self._step, self._counters = None, []  # releases gradients

    def forwarded(self, place: int) -> None:
        assert self._step is not None
        self._step.add(self._order[place])

    def backwarded(self) -> None:
        self._taken += 1
        is_last = self._taken == len(self._order)
        if self._scatters is None:
            leaves = len(self._order) // len(self._counters)
            self._counters[(self._taken - 1) // leaves].add(taken(self._trained()))
            return
        assert isinstance(self._stage, FSDPModule)
        self._stage.set_requires_gradient_sync(True)
        self._stage.set_reshard_after_backward(False)
        for module in self._stage.modules():
            if isinstance(module, FSDPModule):
                _reduce(module, is_last=is_last)
        self._scatters.check(self._taken)

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
