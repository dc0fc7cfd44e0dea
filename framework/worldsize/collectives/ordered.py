"""Sums over logical ranks in one fixed tree, so that the bits are the same at any world size.

The tree of L logical ranks: as long as the number n of nodes is even, node i is added to node i + n/2; an odd
number is added up from the left. Process p of P holds the logical ranks p, p + P, p + 2P ... (dealing "cyclic"),
so the first levels of the tree are local sums. What is left crosses the network as an all-to-all of shards, an
ordered local sum and an all-gather: 2 (P - 1) / P of the gradient, the same bytes as a ring all-reduce, if L / P
is a power of two; otherwise the all-to-all carries several nodes a process.

Where process p holds the k = L / P logical ranks from pk on (dealing "block") and P is a power of two, the first
levels of the same tree are sums over processes: node m of k is the sum of the m-th logical rank of each. So shards
can be summed after each micro-batch, and what is left is a tree of k shards in the process that owns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.collectives.staged import Phases
from worldsize.collectives.step_timer import wait
from worldsize.core import Dealing


@final
@dataclass(frozen=True)
class Tree:
    """The part of the tree over ``logical_ranks`` that each of ``processes`` sums by itself."""

    logical_ranks: int
    processes: int

    @property
    def nodes(self) -> int:
        """The nodes of the level at which processes exchange sums; a multiple of ``processes``."""
        nodes = self.logical_ranks
        while nodes % (2 * self.processes) == 0:
            nodes //= 2
        return nodes

    @property
    def local_nodes(self) -> int:
        """The nodes that each process sums by itself."""
        return self.nodes // self.processes

    def leaves(self, node: int) -> list[int]:
        """Return the leaves of a local node, as positions among this process's logical ranks.

        They come in bit-reversed order, in which a binary counter adds up the tree with few partial sums alive.
        """
        count = self.logical_ranks // self.nodes
        order = [0]
        while len(order) < count:
            order = [2 * index for index in order] + [2 * index + 1 for index in order]
        return [node + self.local_nodes * index for index in order]


def turns(micro_batches: int, processes: int, dealing: Dealing) -> Tree:
    """Return the tree in whose order a process computes its ``micro_batches`` in a step."""
    return Tree(micro_batches, 1) if dealing == "block" else Tree(micro_batches * processes, processes)


@final
class Counter:
    """Adds up lists of tensors as a binary counter does: the sum of 2^k leaves is a balanced tree."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor]]] = []  # leaves in a sum, and the sum; largest first

    def add(self, leaf: list[Tensor]) -> None:
        """Add ``leaf``, which is taken over and changed in place."""
        size = 1
        while self._sums and self._sums[-1][0] == size:
            _add(leaf, self._sums.pop()[1])
            size *= 2
        self._sums.append((size, leaf))

    @property
    def waiting(self) -> list[list[Tensor]]:
        """The partial sums that the last leaf will be added to, in that order."""
        return [tensors for _, tensors in reversed(self._sums)]


@final
class Arrivals:
    """Sums of parts of the tree that come in any order; the same bits as :func:`finish` of all leaves.

    Part (width, index) is node ``index`` of the level that has ``width`` nodes: the sum of the logical ranks
    index, index + width, ... It is a list of tensors, taken over and changed in place.
    """

    def __init__(self, logical_ranks: int) -> None:
        self._root = logical_ranks
        while self._root % 2 == 0:
            self._root //= 2
        self.parts: dict[tuple[int, int], list[Tensor]] = {}

    def add(self, width: int, index: int, part: list[Tensor]) -> None:
        """Add a part; two neighbours are summed as soon as both are there."""
        while width % 2 == 0 and (width, (index + width // 2) % width) in self.parts:
            _add(part, self.parts.pop((width, (index + width // 2) % width)))
            width //= 2
            index %= width
        self.parts[width, index] = part

    def total(self) -> list[Tensor] | None:
        """Return the sum over all logical ranks, or None until all parts have come."""
        nodes = [self.parts.get((self._root, index)) for index in range(self._root)]
        first, *others = nodes
        if first is None or None in others:
            return None
        for node in others:
            _add(first, node or [])
        return first


def _add(sums: list[Tensor], more: list[Tensor]) -> None:
    if sums:  # torch refuses to add nothing to nothing
        torch._foreach_add_(sums, more)


def finish(nodes: Sequence[Tensor]) -> Tensor:
    """Sum the nodes of one level, in the order of the tree."""
    nodes = list(nodes)
    while len(nodes) > 1 and len(nodes) % 2 == 0:
        half = len(nodes) // 2
        nodes = [low + high for low, high in zip(nodes[:half], nodes[half:], strict=True)]
    total = nodes[0]
    for node in nodes[1:]:
        total = total + node
    return total


def reduce_ordered(rows: Sequence[Tensor], group: ProcessGroup, dealing: Dealing = "cyclic") -> Phases:
    """Sum this process's nodes, flat tensors of equal length, with those of the others.

    If logical ranks are dealt in blocks, each of them is a node.
    """
    size, length = dist.get_world_size(group), rows[0].numel()
    shard = -(-length // size)
    mine_pns = rows[0].new_zeros(size, len(rows), shard)
    for node, row in enumerate(rows):
        _spread(row, mine_pns[:, node])
    theirs_pns = torch.empty_like(mine_pns)
    work = dist.all_to_all_single(theirs_pns, mine_pns, group=group, async_op=True)
    yield
    wait(work)
    in_order = theirs_pns if dealing == "block" else theirs_pns.transpose(0, 1)
    total_s = finish(in_order.flatten(0, 1).unbind())
    whole = total_s.new_empty(size * shard)
    work = dist.all_gather_into_tensor(whole, total_s, group=group, async_op=True)
    yield
    wait(work)
    return whole[:length]


def _spread(row: Tensor, shards_ps: Tensor) -> None:
    """Copy a flat tensor into [processes, shard]; the last shards may stay partly zero."""
    for place, part in zip(shards_ps, torch.split(row, shards_ps.shape[1]), strict=False):
        place[: part.numel()] = part
