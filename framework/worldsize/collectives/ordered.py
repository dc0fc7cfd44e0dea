"""Sums over logical ranks in one fixed tree, bitwise identical at any world size.

The tree over L logical ranks: while the number n of nodes is even, node i is added to node i + n/2; an odd number of
nodes is summed from left to right. With dealing "cyclic", process p of P has the logical ranks p, p + P, p + 2P, ...,
so that the first levels of the tree are local sums. An all-to-all of shards, an ordered local sum and an all-gather
reduce the remaining nodes. If L / P is a power of two, a rank sends 2 (P - 1) / P of the gradient, as in a ring
all-reduce; otherwise the all-to-all carries several nodes per process. If P does not divide L, some processes have one
logical rank fewer than others, and all leaves are sent.

With dealing "block", process p has the k = L / P logical ranks from pk on. If P is a power of two, the first levels of
the same tree are sums over processes: node m of k is the sum of the m-th logical rank of each process. Shards can then
be reduced after each micro-batch, and the process that owns a shard sums the remaining tree of k nodes.

Small tensors are averaged in one round: every rank gathers all rows and sums them itself. An all-reduce needs two
rounds, and on a CPU a round costs several thread wake-ups, far more than sending a few kilobytes. With gloo on loopback
one gather takes half the time of an all-reduce, for up to about 1 MiB of gathered rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worldsize.collectives.group import start_collective
from worldsize.collectives.staged import Phases
from worldsize.core import Dealing


@final
@dataclass(frozen=True)
class Tree:
    """The part of the tree over ``logical_ranks`` that each process sums locally."""

    logical_ranks: int
    processes: int

    @property
    def nodes(self) -> int:
        """Number of nodes on the level at which processes exchange sums.

        It is a multiple of ``processes``, or the number of leaves if ``processes`` does not divide ``logical_ranks``.
        """
        nodes = self.logical_ranks
        while nodes % (2 * self.processes) == 0:
            nodes //= 2
        return nodes

    @property
    def local_nodes(self) -> int:
        """Maximum number of exchanged nodes per process; the last processes may have one fewer."""
        return -(-self.nodes // self.processes)

    def count_nodes(self, rank: int) -> int:
        """Return the number of exchanged nodes that process ``rank`` has."""
        return len(range(rank, self.nodes, self.processes))

    def list_leaves(self, node: int) -> list[int]:
        """Return the leaves of a local node, as indices into this process's logical ranks.

        They are in bit-reversed order, so that a binary counter sums the tree with few partial sums in memory.
        """
        count = self.logical_ranks // self.nodes
        order = [0]
        while len(order) < count:
            order = [2 * index for index in order] + [2 * index + 1 for index in order]
        return [node + self.local_nodes * index for index in order]


def summation_tree(micro_batches: int, processes: int, dealing: Dealing) -> Tree:
    """Return the tree that orders the ``micro_batches`` of each process in a step."""
    return Tree(micro_batches, 1) if dealing == "block" else Tree(micro_batches * processes, processes)


@final
class Counter:
    """Sums lists of tensors like a binary counter: the sum of 2^k leaves is a balanced tree."""

    def __init__(self) -> None:
        self._sums: list[tuple[int, list[Tensor]]] = []  # number of leaves and their sum, largest first

    def add(self, leaf: list[Tensor]) -> None:
        """Add ``leaf``, tensors of the same shapes for every leaf; they are modified in place."""
        size = 1
        while self._sums and self._sums[-1][0] == size:
            _add_tensors(leaf, self._sums.pop()[1])
            size *= 2
        self._sums.append((size, leaf))

    @property
    def waiting(self) -> list[list[Tensor]]:
        """The partial sums, shaped like leaves, smallest first; after 2^k leaves only the total."""
        return [tensors for _, tensors in reversed(self._sums)]


@final
class PartialSums:
    """Sums tree nodes that arrive in any order, with the same bits as :func:`sum_level`.

    Part (width, index) is node ``index`` on the level with ``width`` nodes: the sum of the logical ranks index,
    index + width, ... It is a list of tensors, which is modified in place.
    """

    def __init__(self, logical_ranks: int) -> None:
        self._root = logical_ranks
        while self._root % 2 == 0:
            self._root //= 2
        self.parts: dict[tuple[int, int], list[Tensor]] = {}

    def add(self, width: int, index: int, part: list[Tensor]) -> None:
        """Add a part, tensors of any shapes; siblings are summed as soon as both have arrived."""
        while width % 2 == 0 and (width, (index + width // 2) % width) in self.parts:
            _add_tensors(part, self.parts.pop((width, (index + width // 2) % width)))
            width //= 2
            index %= width
        self.parts[width, index] = part

    def compute_total(self) -> list[Tensor] | None:
        """Return the sum over all logical ranks, shaped like a part; None until all have arrived."""
        nodes = [self.parts.get((self._root, index)) for index in range(self._root)]
        first, *others = nodes
        if first is None or None in others:
            return None
        for node in others:
            _add_tensors(first, node or [])
        return first


def _add_tensors(sums: list[Tensor], more: list[Tensor]) -> None:
    for kind in {type(each) for each in sums}:  # torch refuses lists that mix tensors and DTensors
        pairs = [pair for pair in zip(sums, more, strict=True) if type(pair[0]) is kind]
        torch._foreach_add_([each for each, _ in pairs], [each for _, each in pairs])


def sum_level(nodes: Sequence[Tensor] | Tensor) -> Tensor:
    """Sum the nodes of one level (tensors of one shape, or rows of a tensor) in tree order."""
    if isinstance(nodes, Tensor):
        while len(nodes) > 1 and len(nodes) % 2 == 0:
            low, high = nodes.chunk(2)
            nodes = low + high
        nodes = nodes.unbind()
    nodes = list(nodes)
    while len(nodes) > 1 and len(nodes) % 2 == 0:
        half = len(nodes) // 2
        nodes = [low + high for low, high in zip(nodes[:half], nodes[half:], strict=True)]
    total = nodes[0]
    for node in nodes[1:]:
        total = total + node
    return total


def reduce_ordered(
    rows: Sequence[Tensor], group: ProcessGroup, dealing: Dealing = "cyclic", *, nodes: int | None = None
) -> Phases:
    """Sum all processes' tree nodes to (n,); ``rows``: this process's nodes, each (n,).

    With dealing "block", each logical rank is a node. ``nodes``: total over all processes, assigned cyclically; None:
    every process has as many as this one.
    """
    size, length = dist.get_world_size(group), rows[0].numel()
    nodes = size * len(rows) if nodes is None else nodes
    shard = -(-length // size)
    mine_pns = rows[0].new_zeros(size, -(-nodes // size), shard)
    for node, row in enumerate(rows):
        _copy_into_shards(row, mine_pns[:, node])
    theirs_pns = torch.empty_like(mine_pns)
    work = start_collective(dist.all_to_all_single, theirs_pns, mine_pns, group=group)
    yield
    work.wait()
    in_order = theirs_pns if dealing == "block" else theirs_pns.transpose(0, 1)
    total_s = sum_level(in_order.flatten(0, 1)[:nodes])
    total_n = total_s.new_empty(size * shard)
    work = start_collective(dist.all_gather_into_tensor, total_n, total_s, group=group)
    yield
    work.wait()
    return total_n[:length]


def _copy_into_shards(row: Tensor, shards_ps: Tensor) -> None:
    """Copy a tensor (n,) into (processes, shard); the last shards may remain partly zero."""
    for place, part in zip(shards_ps, torch.split(row, shards_ps.shape[1]), strict=False):
        place[: part.numel()] = part


LARGEST = 1 << 20  # bytes of all rows up to which a gather is faster than an all-reduce


def gather_mean(row_n: Tensor, group: ProcessGroup) -> Tensor:
    """Replace ``row_n``, of shape (n,), with its mean over ranks; all ranks get the same bits."""
    size = dist.get_world_size(group)
    rows_pn = row_n.new_empty(size * row_n.numel())
    start_collective(dist.all_gather_into_tensor, rows_pn, row_n, group=group).wait()
    return torch.div(sum_level(rows_pn.view(size, -1)), size, out=row_n)
