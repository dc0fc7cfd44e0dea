"""The fixed tree of :mod:`worldsize.dist.ordered` as reduce-scatters of a model sharded by ``fully_shard``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from worldsize.core import Dealing
from worldsize.dist.ordered import Counter, Tree, sum_level
from worldsize.dist.step_timer import wait


@final
class OrderedScatters:
    """The reduce-scatters of all units of ``model``, in the fixed tree.

    ``group``: the ranks that train it; ``copies``: those with the same shards (None: there is one copy).
    """

    def __init__(
        self, model: nn.Module, group: ProcessGroup, copies: ProcessGroup | None = None, dealing: Dealing = "cyclic"
    ) -> None:
        self.dealing: Dealing = dealing
        units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._scatters = [_OrderedScatter(_Exchange(group, copies), dealing) for _ in units]
        for module, scatter in zip(units, self._scatters, strict=True):
            module.set_custom_reduce_scatter(scatter)
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)

    def begin(self, nodes: int, micro_batches: int, *, logical_ranks: int) -> None:
        """Begin a step in which this rank adds up its micro-batches in ``nodes`` nodes; without any it adds nothing."""
        for scatter in self._scatters:
            scatter.begin(nodes, micro_batches, logical_ranks=logical_ranks)

    def end_pass(self, micro_batches: int) -> None:
        """Record that so many ``micro_batches`` of the step are done; units that were not computed add zeros."""
        for scatter in self._scatters:
            scatter.done = micro_batches

    @property
    def kept(self) -> list[Tensor]:
        """Partial sums, of any shapes, that all units keep between two micro-batches."""
        return [tensor for scatter in self._scatters for tensor in scatter.kept]


@final
class _OrderedScatter(ReduceScatter):
    """Sums the gradients of one unit's micro-batches; the last call returns this rank's shard of their mean.

    If a rank has several nodes of the tree, it computes one after the other. Shards are added up as they arrive;
    unsharded nodes must all be complete first, since the tree continues across ranks.
    """

    def __init__(self, exchange: _Exchange, dealing: Dealing) -> None:
        self._exchange, self._sums_shards = exchange, dealing == "block"
        self._nodes = self._leaves = 1  # this rank's nodes in a step, and the leaves of each
        self._logical_ranks = exchange.ranks
        self._counter, self._sums = Counter(), list[Tensor]()  # of the node in progress, and of earlier nodes
        self._taken = 0  # micro-batches of the step so far that are in the sums
        self.done = 0
        """Micro-batches of the step that have been computed, with this unit or without it."""

    def begin(self, nodes: int, micro_batches: int, *, logical_ranks: int) -> None:
        """Begin a step in which this rank adds up its micro-batches in ``nodes`` nodes; without any it adds nothing."""
        self._nodes, self._leaves, self._logical_ranks = nodes, micro_batches // nodes, logical_ranks
        self._counter, self._sums, self._taken, self.done = Counter(), [], 0, 0

    @property
    def kept(self) -> list[Tensor]:
        """Sums, of any shapes, of the nodes that are complete, and partial ones of that in progress."""
        return [*self._sums, *(tensor for tensors in self._counter.waiting for tensor in tensors)]

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Add the unit's gradients ``input_tensor`` (shards * s,); write this rank's mean to ``output_tensor`` (s,)."""
        if self._leaves == 0:
            output_tensor.zero_()
            return
        gradient = input_tensor.view(group.size(), -1)
        ranks = self._exchange.ranks
        leaf = self._exchange.sum_of_part([gradient], ranks) if self._sums_shards else gradient.clone()
        for _ in range(self.done - self._taken):  # earlier ones that did not compute the unit
            self._add(torch.zeros_like(leaf))
        self._add(leaf)
        if self._taken < self._nodes * self._leaves:
            output_tensor.zero_()
            return
        nodes, self._sums = self._sums, []
        all_nodes = Tree(self._logical_ranks, ranks).nodes
        part = nodes[0] if self._sums_shards else self._exchange.sum_of_part(nodes, all_nodes)
        output_tensor.copy_(self._exchange.shard_of(part / self._logical_ranks)[: len(output_tensor)])

    def _add(self, leaf: Tensor) -> None:
        self._taken += 1
        self._counter.add([leaf])
        if self._taken % self._leaves:
            return
        ((node,),) = self._counter.waiting
        self._counter = Counter()
        if self._sums and self._sums_shards:
            self._sums[0] += node  # an odd number of nodes is added up from the left
        else:
            self._sums.append(node)


@final
class _Exchange:
    """Sums one unit's gradients over the ranks of all copies at once; each rank sums a part of its shard.

    ``group``: all ranks, where those of one copy of the model are consecutive; ``copies``: the ranks with the same
    shard.
    """

    def __init__(self, group: ProcessGroup, copies: ProcessGroup | None) -> None:
        self._group, self._copies = group, copies
        self.ranks = group.size()

    def sum_of_part(self, rows: Sequence[Tensor], nodes: int) -> Tensor:
        """Return this rank's part of the sum over all ranks of ``rows``, which are nodes of the tree: (shards, s).

        ``nodes``: those of all ranks, which deal them cyclically.
        """
        copies = self._copies.size() if self._copies else 1
        shards, length = rows[0].shape
        size = -(-length // copies)
        mine = rows[0].new_zeros(copies, shards, -(-nodes // self.ranks), size)
        for node, row in enumerate(rows):
            for copy, piece in enumerate(torch.split(row, size, dim=1)):
                mine[copy, :, node, : piece.shape[1]] = piece
        theirs_pns = torch.empty_like(mine.flatten(0, 1))
        wait(dist.all_to_all_single(theirs_pns, mine.flatten(0, 1), group=self._group, async_op=True))
        return sum_level(theirs_pns.transpose(0, 1).flatten(0, 1)[:nodes].unbind())

    def shard_of(self, part: Tensor) -> Tensor:
        """Concatenate the parts of all copies to this rank's shard, with padding at its end."""
        if self._copies is None:
            return part
        shard = part.new_empty(self._copies.size() * len(part))
        wait(dist.all_gather_into_tensor(shard, part, group=self._copies, async_op=True))
        return shard
