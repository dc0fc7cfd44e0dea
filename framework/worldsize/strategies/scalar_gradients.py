"""Mean gradients of the parameters of a sharded model that cannot be sharded, since they have no dimensions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from itertools import chain
from typing import final

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from worldsize.core import Dealing, Reduction
from worldsize.dist.ordered import Counter, Tree, reduce_ordered
from worldsize.dist.staged import finished
from worldsize.dist.step_timer import wait
from worldsize.strategies.presence import Presence


class ScalarGradients(ABC):
    """Averages the gradients of parameters that every rank holds, over the micro-batches of all ranks in a step.

    A gradient that no micro-batch has stays None.
    """

    @abstractmethod
    def begin(self, batches: int, logical_ranks: int) -> None:
        """Begin a step of ``batches`` micro-batches on this rank, of ``logical_ranks`` in all."""

    @abstractmethod
    def add(self, batch: int) -> None:
        """Add the gradients that the backward pass of this micro-batch has left."""

    @abstractmethod
    def finish(self) -> None:
        """Leave the mean in ``.grad``; all ranks must call it."""


def scalar_gradients(
    reduce: Reduction, model: nn.Module, group: ProcessGroup, dealing: Dealing = "cyclic"
) -> ScalarGradients:
    """Make the sums over ``group`` for the parameters of ``model`` that are not sharded."""
    own = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    if not own:
        return _NO_SCALARS
    return _OrderedScalars(own, group, dealing) if reduce == "ordered" else _FlatScalars(own, group)


@final
class _NoScalars(ScalarGradients):
    def begin(self, batches: int, logical_ranks: int) -> None: ...

    def add(self, batch: int) -> None: ...

    def finish(self) -> None: ...


_NO_SCALARS = _NoScalars()


@final
class _FlatScalars(ScalarGradients):
    """Lets autograd add up micro-batches, whose losses are scaled so that the mean over ranks is that of the step."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
        self._tables, self._group = _by_dtype(parameters), group

    def begin(self, batches: int, logical_ranks: int) -> None: ...

    def add(self, batch: int) -> None: ...

    def finish(self) -> None:
        for parameters in self._tables:
            table_2n = _table(parameters)
            wait(dist.all_reduce(table_2n, group=self._group, async_op=True))
            present = {index for index, parameter in enumerate(parameters) if parameter.grad is not None}
            _set(parameters, table_2n, self._group.size(), present)


@final
class _OrderedScalars(ScalarGradients):
    """Sums in the fixed tree of :mod:`worldsize.dist.ordered`, with the bits of every other strategy."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup, dealing: Dealing) -> None:
        self._tables, self._group, self._dealing = _by_dtype(parameters), group, dealing
        self._counters: list[Counter] = []
        self._presences: list[Presence] = []  # of the gradients of each table in this step
        self._node: dict[int, int] = {}  # of each micro-batch of this rank
        self._logical_ranks = self._nodes = 1

    def begin(self, batches: int, logical_ranks: int) -> None:
        self._logical_ranks = self._nodes = logical_ranks
        if self._dealing == "block":
            self._node = {batch: batch for batch in range(batches)}
        else:
            tree, rank = Tree(logical_ranks, self._group.size()), self._group.rank()
            self._nodes = tree.nodes
            self._node = {leaf: node for node in range(tree.nodes_of(rank)) for leaf in tree.leaves(node)}
        self._counters = [Counter() for _ in set(self._node.values())]
        self._presences = [Presence(parameters) for parameters in self._tables]

    def add(self, batch: int) -> None:
        self._counters[self._node[batch]].add([_table(parameters) for parameters in self._tables])
        for presence in self._presences:
            presence.note()
        for parameter in chain.from_iterable(self._tables):
            parameter.grad = None

    def finish(self) -> None:
        sums = [counter.waiting[0] for counter in self._counters]
        for parameters, presence, *rows in zip(self._tables, self._presences, *sums, strict=True):
            flat = [row.flatten() for row in rows]
            total = finished(reduce_ordered(flat, self._group, self._dealing, nodes=self._nodes))
            present = {*range(len(parameters))} - presence.absent
            _set(parameters, total.view(2, -1), self._logical_ranks, present)
        self._counters = []


def _by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    dtypes = dict.fromkeys(parameter.dtype for parameter in parameters)
    return [[each for each in parameters if each.dtype == dtype] for dtype in dtypes]


def _table(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients, and 1 for each that there is: (2, n)."""
    table_2n = parameters[0].new_zeros(2, len(parameters))
    for place, parameter in enumerate(parameters):
        if parameter.grad is not None:
            table_2n[0, place], table_2n[1, place] = parameter.grad, 1
    return table_2n


def _set(parameters: Sequence[nn.Parameter], total_2n: Tensor, divisor: int, present: Set[int]) -> None:
    """Set the gradients, those that any micro-batch had, from the sums of :func:`_table`.

    ``present``: indices of gradients that this rank had; reading the others waits for a GPU.
    """
    for index, (parameter, total, count) in enumerate(zip(parameters, *(total_2n / divisor), strict=True)):
        parameter.grad = total.clone() if index in present or bool(count) else None
