"""Mean gradients of a model that ``fully_shard`` has divided: each rank ends with its own shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor

from worldsize.collectives.ordered import Counter, Tree, finish
from worldsize.collectives.step_timer import phase
from worldsize.collectives.timed_sharding import time_sharding
from worldsize.core import MicroBatch, Reduction, World
from worldsize.strategies.buffer_mean import BufferMean
from worldsize.strategies.gradient_reducer import Backward, GradientReducer
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.reducers import gradient_reducer


def sharded_reducer(
    reduce: Reduction,
    model: nn.Module,
    world: World,
    copies: ProcessGroup | None = None,
    *,
    averages_buffers: bool = True,
    accumulates_shards: bool = False,
) -> GradientReducer:
    """Make the reducer of ``model``, sharded if it is an FSDPModule.

    Args:
        reduce: Order of sums.
        model: The model.
        world: The ranks that train it.
        copies: The ranks with the same shards; None: there is one copy.
        averages_buffers: Whether the reducer averages what forward passes change, such as BatchNorm's statistics.
        accumulates_shards: Whether gradients are reduced after each micro-batch, which the fixed tree does not do.
    """
    if not isinstance(model, FSDPModule):
        return gradient_reducer(reduce, model, None)
    time_sharding(model, world.device, copies=copies is not None and reduce != "ordered")
    buffers = BufferMean(model if averages_buffers else nn.Module(), world.group)
    if reduce == "ordered":
        return OrderedShardReducer(model, world, copies, buffers)
    return ReduceScatterReducer(model, buffers, accumulates_shards=accumulates_shards)


@final
class ReduceScatterReducer(GradientReducer):
    """Torch's reduce-scatter, once a step: the gradients of earlier micro-batches are kept whole until then.

    With ``accumulates_shards`` it comes after each micro-batch, and shards are added up; copies meet once a step.
    """

    def __init__(self, model: FSDPModule, buffers: BufferMean, *, accumulates_shards: bool = False) -> None:
        assert isinstance(model, nn.Module)
        self._model, self._buffers, self._accumulates_shards = model, buffers, accumulates_shards

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        buffers = self._buffers.begin(len(batches))
        losses = []
        for place, batch in enumerate(batches):
            last = place == len(batches) - 1
            self._model.set_requires_gradient_sync(last or self._accumulates_shards)
            self._model.set_requires_all_reduce(last)
            self._model.set_is_last_backward(last)
            losses.append(backward(batch, 1 / len(batches)))
            buffers.add(place)
        buffers.finish()
        return losses

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        assert isinstance(norm, DTensor)
        with phase("communication"):
            norm = norm.full_tensor()
        return _clipped(parameters, limit, norm)


@final
class OrderedShardReducer(GradientReducer):
    """The fixed tree of :mod:`worldsize.collectives.ordered`, as FSDP's reduce-scatter: the bits of every other
    strategy at every world size. Micro-batches but the last are summed here, whole.
    """

    def __init__(self, model: FSDPModule, world: World, copies: ProcessGroup | None, buffers: BufferMean) -> None:
        assert isinstance(model, nn.Module)
        assert world.group is not None
        self._model, self._size, self._buffers = model, world.size, buffers
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._scatters = [_OrderedScatter(world.group, copies) for _ in modules]
        for module, scatter in zip(modules, self._scatters, strict=True):
            module.set_custom_reduce_scatter(scatter)
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        tree, losses = Tree(len(batches) * self._size, self._size), dict[int, LossRecord]()
        buffers = self._buffers.begin(len(batches))
        for scatter in self._scatters:
            scatter.begin(tree)
        order = [(node, leaf) for node in range(tree.local_nodes) for leaf in tree.leaves(node)]
        for place, (node, leaf) in enumerate(order):
            for scatter in self._scatters:
                scatter.expect(node, last=place == len(order) - 1)
            losses[leaf] = backward(batches[leaf], 1.0)
            buffers.add(leaf)
            if place < len(order) - 1:
                self._model.zero_grad()  # shards of zeros
        buffers.finish()
        return [losses[leaf] for leaf in range(len(batches))]

    def clip(self, parameters: Sequence[nn.Parameter], limit: float) -> Tensor:
        """Clip by the norm of whole gradients, gathered one at a time: its bits are those of an unsharded model."""
        whole = (_gathered(parameter.grad) for parameter in parameters if isinstance(parameter.grad, DTensor))
        norms = [torch._foreach_norm([gradient])[0] for gradient in whole]  # as clip_grad_norm_ does
        return _clipped(parameters, limit, torch.linalg.vector_norm(torch.stack(norms)))


def _gathered(gradient: DTensor) -> Tensor:
    with phase("communication"):
        return gradient.full_tensor()


def _clipped(parameters: Sequence[nn.Parameter], limit: float, norm: Tensor) -> Tensor:
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
    return norm


@final
class _OrderedScatter(ReduceScatter):
    """Sums one unit's micro-batches until the last, then exchanges with the ranks of all copies at once.

    ``group``: every rank, those that hold one copy of the model next to each other; ``copies``: those that hold the
    same shard.
    """

    def __init__(self, group: ProcessGroup, copies: ProcessGroup | None) -> None:
        self._group, self._copies = group, copies
        self._tree = Tree(group.size(), group.size())
        self._counters = [Counter()]
        self._node, self._is_last = 0, True

    def begin(self, tree: Tree) -> None:
        """Begin a step whose micro-batches are summed in ``tree``."""
        self._tree = tree
        self._counters = [Counter() for _ in range(tree.local_nodes)]

    def expect(self, node: int, *, last: bool) -> None:
        """Prepare for the gradients of a micro-batch of this local node; is it the ``last`` one of the step?"""
        self._node, self._is_last = node, last

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Add the unit's gradients, ``input_tensor`` [shards * s]; leave this rank's mean in ``output_tensor`` [s]."""
        self._counters[self._node].add([input_tensor.clone()])
        if not self._is_last:
            output_tensor.zero_()
            return
        rows = [counter.waiting[0][0].view(dist.get_world_size(group), -1) for counter in self._counters]
        self._counters = []
        output_tensor.copy_(self._exchanged(rows))

    def _exchanged(self, rows: Sequence[Tensor]) -> Tensor:
        """Return this rank's shard of the mean of ``rows`` [shards, s]; each copy sums a part, and all share them."""
        copies = dist.get_world_size(self._copies) if self._copies else 1
        shards, length = rows[0].shape
        part = -(-length // copies)
        mine = rows[0].new_zeros(copies, shards, len(rows), part)
        for node, row in enumerate(rows):
            for copy, piece in enumerate(torch.split(row, part, dim=1)):
                mine[copy, :, node, : piece.shape[1]] = piece
        theirs_pns = torch.empty_like(mine.flatten(0, 1))
        with phase("communication"):
            dist.all_to_all_single(theirs_pns, mine.flatten(0, 1), group=self._group)
        mean_s = finish(theirs_pns.transpose(0, 1).flatten(0, 1).unbind()) / self._tree.logical_ranks
        if self._copies is None:
            return mean_s
        whole = mean_s.new_empty(copies * part)
        with phase("communication"):
            dist.all_gather_into_tensor(whole, mean_s, group=self._copies)
        return whole[:length]
