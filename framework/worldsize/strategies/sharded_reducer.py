"""Mean gradients of a model sharded by ``fully_shard``: each rank ends with its own shards.

Every pass gathers parameters from all ranks, so that all need equally many in a step. A rank with fewer logical ranks
than others first computes one of its own for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from worldsize.collectives.gather_full import whole
from worldsize.collectives.ordered import Counter, Tree, sum_level, summation_tree
from worldsize.collectives.step_timer import phase, wait
from worldsize.collectives.timed_sharding import time_sharding
from worldsize.core import ConfigError, Dealing, MicroBatch, Reduction, World
from worldsize.strategies.gradient_reducer import Backward, GradientReducer, OrderedSums
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.reducers import gradient_reducer
from worldsize.strategies.scalar_gradients import ScalarGradients, scalar_gradients
from worldsize.strategies.step_buffers import BufferMean


def sharded_reducer(
    reduce: Reduction,
    model: nn.Module,
    world: World,
    copies: ProcessGroup | None = None,
    *,
    averages_buffers: bool = True,
    accumulates_shards: bool = False,
    logical_ranks: int | None = None,
) -> GradientReducer:
    """Make the reducer of ``model``, sharded if it is an FSDPModule.

    Args:
        reduce: Order of sums.
        model: The model; FSDP knows of its copies only if sums are not ordered and ``logical_ranks`` is None.
        world: The ranks that train it.
        copies: The ranks with the same shards; None: there is one copy.
        averages_buffers: Whether the reducer averages buffers that forward passes change, such as BatchNorm's.
        accumulates_shards: Whether gradients are reduced after each micro-batch. The number of ranks must then be a
            power of two for the fixed tree, and each has consecutive logical ranks.
        logical_ranks: Those of all processes, which may have different numbers of them; None: all have equally many.
    """
    if not isinstance(model, FSDPModule):
        return gradient_reducer(reduce, model, None)
    sums_copies = copies is not None and reduce != "ordered"
    time_sharding(model, world.device, copies=sums_copies and logical_ranks is None)
    dealing: Dealing = "block" if reduce == "ordered" and accumulates_shards else "cyclic"
    own = model if averages_buffers else nn.Module()
    buffers = BufferMean(own, world.group, dealing, logical_ranks=logical_ranks)
    assert world.group is not None
    scalars = scalar_gradients(reduce, model, world.group, dealing)
    if reduce == "ordered":
        return OrderedShardReducer(model, world, copies, buffers, scalars, dealing, logical_ranks)
    if copies is not None and logical_ranks is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(partial(_average, copies))
    return ReduceScatterReducer(
        model, world, buffers, scalars, accumulates_shards=accumulates_shards, logical_ranks=logical_ranks
    )


def _average(copies: ProcessGroup, shard: Tensor) -> None:
    """Replace a shard, a tensor (s,), by its mean over copies, with a wait that ends when the gang does."""
    shard.div_(copies.size())
    wait(dist.all_reduce(shard, group=copies, async_op=True))


@final
class ReduceScatterReducer(GradientReducer):
    """Torch's reduce-scatter, once per step: gradients of earlier micro-batches are kept unsharded until then.

    With ``accumulates_shards`` it runs after each micro-batch, and shards are added up; copies are summed once per
    step, unless ranks may have different numbers of ``logical_ranks``.
    """

    def __init__(
        self,
        model: FSDPModule,
        world: World,
        buffers: BufferMean,
        scalars: ScalarGradients,
        *,
        accumulates_shards: bool = False,
        logical_ranks: int | None = None,
    ) -> None:
        assert isinstance(model, nn.Module)
        self._model, self._buffers, self._accumulates_shards = model, buffers, accumulates_shards
        self._scalars, self._size, self._logical_ranks = scalars, world.size, logical_ranks

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        losses = []
        logical_ranks = self._logical_ranks or len(batches) * self._size
        with self._buffers.step(len(batches)) as buffers:
            if _is_one_short(batches, logical_ranks, self._size):
                self._synchronize(last=False)
                backward(batches[0], 0.0)
                buffers.restore()
            for place, batch in enumerate(batches):
                self._synchronize(last=place == len(batches) - 1)
                losses.append(backward(batch, self._size / logical_ranks))
                buffers.add(place)
        self._scalars.finish()
        return losses

    def _synchronize(self, *, last: bool) -> None:
        """Set what the next pass sums over ranks; ``last``: no other follows in the step."""
        self._model.set_requires_gradient_sync(last or self._accumulates_shards)
        self._model.set_requires_all_reduce(last)
        self._model.set_is_last_backward(last)

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm([gradient for gradient in gradients if isinstance(gradient, DTensor)])
        if isinstance(norm, DTensor):
            with phase("communication"):
                norm = norm.full_tensor()
        if scalars := [gradient for gradient in gradients if not isinstance(gradient, DTensor)]:
            others = nn.utils.get_total_norm(scalars)
            norm = torch.linalg.vector_norm(torch.stack([norm.to(others), others]))
        return _clipped(parameters, limit, norm)


@final
class OrderedShardReducer(OrderedSums):
    """The fixed tree of :mod:`worldsize.collectives.ordered` as FSDP's reduce-scatter.

    It gives the bits of every other strategy at every world size. With dealing "cyclic", gradients of micro-batches are
    summed locally and reduced with the last one; with "block", each is reduced, and shards are summed.
    """

    def __init__(
        self,
        model: FSDPModule,
        world: World,
        copies: ProcessGroup | None,
        buffers: BufferMean,
        scalars: ScalarGradients,
        dealing: Dealing,
        logical_ranks: int | None = None,
    ) -> None:
        assert isinstance(model, nn.Module)
        assert world.group is not None
        self._model, self._world, self._buffers, self.dealing = model, world, buffers, dealing
        self._scalars, self._logical_ranks = scalars, logical_ranks
        self._scatters = OrderedScatters(model, world.group, copies, dealing)

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        size, is_block = self._world.size, self.dealing == "block"
        logical_ranks, losses = self._logical_ranks or len(batches) * size, dict[int, LossRecord]()
        tree = summation_tree(len(batches), size, "block") if is_block else Tree(logical_ranks, size)
        nodes = tree.nodes_of(0 if is_block else self._world.rank)
        order = [leaf for node in range(nodes) for leaf in tree.leaves(node)]
        with self._buffers.step(len(batches)) as buffers:
            if _is_one_short(batches, logical_ranks, size):
                self._scatters.begin(nodes, 0, logical_ranks=logical_ranks)
                backward(batches[0], 0.0)
                buffers.restore()
                self._model.zero_grad()
            self._scatters.begin(nodes, len(batches), logical_ranks=logical_ranks)
            self._scalars.begin(len(batches), logical_ranks)
            for place, leaf in enumerate(order, 1):
                losses[leaf] = backward(batches[leaf], 1.0)
                buffers.add(leaf)
                self._scalars.add(leaf)
                self._scatters.check(place)
                if place < len(order):
                    self._model.zero_grad()  # removes shards of zeros
        self._scalars.finish()
        return [losses[leaf] for leaf in range(len(batches))]

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Clip by the norm of full gradients, gathered one at a time, and return it, a scalar.

        It has the same bits as the norm of an unsharded model.
        """
        gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
        full = (whole(each) if isinstance(each, DTensor) else each for each in gradients)
        norms = [torch._foreach_norm([gradient])[0] for gradient in full]  # like clip_grad_norm_
        return _clipped(parameters, limit, torch.linalg.vector_norm(torch.stack(norms)))


def _is_one_short(batches: Sequence[MicroBatch], logical_ranks: int, ranks: int) -> bool:
    """Return whether other ranks have one more of the ``logical_ranks`` than this one."""
    return len(batches) < -(-logical_ranks // ranks)


def _clipped(parameters: Sequence[nn.Parameter], limit: float, norm: Tensor) -> Tensor:
    for is_sharded in (True, False):  # torch has no operation that takes both
        own = [parameter for parameter in parameters if isinstance(parameter.grad, DTensor) is is_sharded]
        nn.utils.clip_grads_with_norm_(own, limit, norm)
    return norm


@final
class OrderedScatters:
    """The reduce-scatters of all units of ``model``, in the fixed tree.

    ``group``: the ranks that train it; ``copies``: those with the same shards (None: there is one copy).
    """

    def __init__(
        self, model: nn.Module, group: ProcessGroup, copies: ProcessGroup | None = None, dealing: Dealing = "cyclic"
    ) -> None:
        named = model.named_modules()  # the prefix is that of a model in a CallingRoot
        units = {name.removeprefix("model."): module for name, module in named if isinstance(module, FSDPModule)}
        self._scatters = [_OrderedScatter(name, _Exchange(group, copies), dealing) for name in units]
        for module, scatter in zip(units.values(), self._scatters, strict=True):
            module.set_custom_reduce_scatter(scatter)
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)

    def begin(self, nodes: int, micro_batches: int, *, logical_ranks: int) -> None:
        """Begin a step in which this rank adds up its micro-batches in ``nodes`` nodes; without any it adds nothing."""
        for scatter in self._scatters:
            scatter.begin(nodes, micro_batches, logical_ranks=logical_ranks)

    def check(self, micro_batches: int) -> None:
        """Raise ConfigError if a unit had gradients in some of the step's ``micro_batches``, but not in all."""
        for scatter in self._scatters:
            scatter.check(micro_batches)

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

    def __init__(self, unit: str, exchange: _Exchange, dealing: Dealing) -> None:
        self._unit, self._exchange, self._sums_shards = unit or "the model", exchange, dealing == "block"
        self._nodes = self._leaves = 1  # this rank's nodes in a step, and the leaves of each
        self._logical_ranks = exchange.ranks
        self._counter, self._sums = Counter(), list[Tensor]()  # of the node in progress, and of earlier nodes
        self._taken = 0  # micro-batches of the step so far

    def begin(self, nodes: int, micro_batches: int, *, logical_ranks: int) -> None:
        """Begin a step in which this rank adds up its micro-batches in ``nodes`` nodes; without any it adds nothing."""
        self._nodes, self._leaves, self._logical_ranks = nodes, micro_batches // nodes, logical_ranks
        self._counter, self._sums, self._taken = Counter(), [], 0

    def check(self, micro_batches: int) -> None:
        """Raise ConfigError if the unit had gradients in some of the step's ``micro_batches``, but not in all."""
        if self._taken not in (0, micro_batches):
            raise self._incomplete(micro_batches)

    @property
    def kept(self) -> list[Tensor]:
        """Sums, of any shapes, of the nodes that are complete, and partial ones of that in progress."""
        return [*self._sums, *(tensor for tensors in self._counter.waiting for tensor in tensors)]

    def _incomplete(self, micro_batch: int) -> ConfigError:
        return ConfigError(
            f"parameters of {self._unit} have a gradient in some micro-batches of a step, and not in micro-batch "
            f"{micro_batch} of this process: sharded gradients cannot be added up in a fixed order then. Let the loss "
            "depend on all parameters in each micro-batch, or use strategy=ddp or zero."
        )

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
        known = self.kept
        if known and known[0].shape != leaf.shape:
            raise self._incomplete(self._taken)
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
