"""Mean gradients of a model sharded with ``fully_shard``; each rank gets its own shards.

Every pass gathers parameters from all ranks, so all ranks need the same number of passes per step. A rank with fewer
logical ranks than others first computes an extra pass and discards it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from worldsize.collectives.gather_full import gather_full_tensor
from worldsize.collectives.group import start_collective
from worldsize.collectives.ordered import Tree, summation_tree
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import Dealing, MicroBatch, Reduction, World
from worldsize.strategies.gradient_reducer import (
    Backward,
    GradientReducer,
    Observe,
    OrderedSums,
    compute_aligned_norm,
    observe_parameters,
    set_gradients_aside,
)
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.reducers import gradient_reducer
from worldsize.strategies.step_buffers import BufferMean
from worldsize.strategies.unit_collectives import OrderedScatters, UnitOrder, time_sharding
from worldsize.strategies.unit_gradients import ScalarGradients, UnitGradients, scalar_gradients


def create_sharded_reducer(
    reduce: Reduction,
    model: nn.Module,
    world: World,
    copies: ProcessGroup | None = None,
    *,
    takes_one_update: bool = True,
    accumulates_shards: bool = False,
    logical_ranks: int | None = None,
) -> GradientReducer:
    """Create the reducer of ``model``, a sharded one if it is an FSDPModule.

    Args:
        reduce: Order of sums.
        model: The model; FSDP itself sums over copies only if sums are not ordered and ``logical_ranks`` is None.
        world: The ranks that train it.
        copies: The ranks with the same shards, or None if there is only one copy.
        takes_one_update: Whether a step is one update. The reducer then averages buffers that forward passes change,
            such as BatchNorm's.
        accumulates_shards: Whether gradients are reduced after each micro-batch. The fixed tree then requires a power
            of two ranks, and gives each rank consecutive logical ranks.
        logical_ranks: Total over all processes, if their shares may differ; None if all have the same number.
    """
    if not isinstance(model, FSDPModule):
        return gradient_reducer(reduce, model, None)
    sums_copies = copies is not None and reduce != "ordered"
    assert world.group is not None
    time_sharding(model, world.device, copies=sums_copies and logical_ranks is None)
    dealing: Dealing = "block" if reduce == "ordered" and accumulates_shards else "cyclic"
    own = model if takes_one_update else nn.Module()
    buffers = BufferMean(own, world.group, dealing, logical_ranks=logical_ranks)
    scalars = scalar_gradients(reduce, model, world.group, dealing)
    scatters = None
    if reduce == "ordered":
        scatters = OrderedScatters(model, world.group, copies, dealing)
    elif copies is not None and logical_ranks is not None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(partial(_average_shard, copies))
    units = Units(UnitGradients(model, world.group, one_update=takes_one_update), UnitOrder(model, world.group))
    if scatters is not None:
        return OrderedShardReducer(model, world, scatters, units, buffers, scalars, logical_ranks)
    return ReduceScatterReducer(
        model, world, units, buffers, scalars, accumulates_shards=accumulates_shards, logical_ranks=logical_ranks
    )


def _average_shard(copies: ProcessGroup, shard: Tensor) -> None:
    """Replace a shard (s,) with its mean over copies; the wait ends with the membership."""
    shard.div_(copies.size())
    start_collective(dist.all_reduce, shard, group=copies).wait()


@final
@dataclass(frozen=True)
class Units:
    """The units of a sharded model; ranks may use different parameters of a unit in a step.

    ``order``: checks that all ranks compute the same units.
    """

    gradients: UnitGradients
    order: UnitOrder

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step within the context, then remove gradients of parameters that no rank used."""
        self.gradients.begin_step()
        with self.order.step():
            yield
        self.gradients.remove_missing()


@final
class ReduceScatterReducer(GradientReducer):
    """Averages with torch's reduce-scatter once per step, from accumulated unsharded gradients.

    With ``accumulates_shards``, the reduce-scatter runs after each micro-batch, and shards are accumulated. Copies are
    summed once per step, unless ranks may have different numbers of ``logical_ranks``.
    """

    divides_gradients = True

    def __init__(
        self,
        model: FSDPModule,
        world: World,
        units: Units,
        buffers: BufferMean,
        scalars: ScalarGradients,
        *,
        accumulates_shards: bool = False,
        logical_ranks: int | None = None,
    ) -> None:
        assert isinstance(model, nn.Module)
        self._model, self._buffers, self._accumulates_shards = model, buffers, accumulates_shards
        self._units, self._scalars = units, scalars
        self._size, self._logical_ranks = world.size, logical_ranks

    def begin_updates(self) -> AbstractContextManager[None]:
        return self._units.order.step()

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        losses = []
        logical_ranks = self._logical_ranks or len(batches) * self._size
        with self._buffers.step(len(batches)) as buffers, self._units.step():  # combines buffers last
            if _is_one_short(batches, logical_ranks, self._size):
                self._synchronize(last=False)
                backward(batches[0], 0.0)
                buffers.restore()
            for place, batch in enumerate(batches):
                self._synchronize(last=place == len(batches) - 1)
                losses.append(backward(batch, self._size / logical_ranks))
                buffers.add(place)
        self._scalars.set_means()
        return losses

    def _synchronize(self, *, last: bool) -> None:
        """Set how to reduce the next pass over ranks; ``last``: whether it is the last of the step."""
        self._model.set_requires_gradient_sync(last or self._accumulates_shards)
        self._model.set_requires_all_reduce(last)
        self._model.set_is_last_backward(last)

    def compute_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm([gradient for gradient in gradients if isinstance(gradient, DTensor)])
        if isinstance(norm, DTensor):
            with measure_phase("communication"):
                norm = norm.full_tensor()
        if scalars := [gradient for gradient in gradients if not isinstance(gradient, DTensor)]:
            others = nn.utils.get_total_norm(scalars)
            norm = torch.linalg.vector_norm(torch.stack([norm.to(others), others]))
        return norm


@final
class OrderedShardReducer(OrderedSums):
    """Uses the fixed tree of :mod:`worldsize.collectives.ordered` for FSDP's reduce-scatter.

    Gradients have the same bits as with every other strategy and world size. With "cyclic" dealing, micro-batches are
    summed locally and reduced after the last one; with "block", each one is reduced, and shards are summed.
    """

    divides_gradients = True

    def __init__(
        self,
        model: FSDPModule,
        world: World,
        scatters: OrderedScatters,
        units: Units,
        buffers: BufferMean,
        scalars: ScalarGradients,
        logical_ranks: int | None = None,
    ) -> None:
        assert isinstance(model, nn.Module)
        self._model, self._world, self._buffers, self.dealing = model, world, buffers, scatters.dealing
        self._logical_ranks = logical_ranks
        self._scatters, self._units, self._scalars = scatters, units, scalars

    def begin_updates(self) -> AbstractContextManager[None]:
        return self._units.order.step()

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        size, is_block = self._world.size, self.dealing == "block"
        logical_ranks, losses = self._logical_ranks or len(batches) * size, dict[int, LossRecord]()
        tree = summation_tree(len(batches), size, "block") if is_block else Tree(logical_ranks, size)
        nodes = tree.count_nodes(0 if is_block else self._world.rank)
        order = [leaf for node in range(nodes) for leaf in tree.list_leaves(node)]
        with self._buffers.step(len(batches)) as buffers, self._units.step():  # combines buffers last
            if _is_one_short(batches, logical_ranks, size):
                self._scatters.begin_step(nodes, 0, logical_ranks=logical_ranks)
                backward(batches[0], 0.0)
                buffers.restore()
                self._model.zero_grad()
            self._scatters.begin_step(nodes, len(batches), logical_ranks=logical_ranks)
            self._scalars.begin_step(len(batches), logical_ranks)
            for place, leaf in enumerate(order, 1):
                losses[leaf] = backward(batches[leaf], 1.0)
                buffers.add(leaf)
                self._scalars.add(leaf)
                self._scatters.end_pass(place)
                if place < len(order):
                    self._model.zero_grad()  # remove shards of zeros
        self._scalars.set_means()
        return [losses[leaf] for leaf in range(len(batches))]

    def run_apart(self, batch: MicroBatch, backward: Backward) -> LossRecord:
        kept = self._buffers.snapshot_buffers()
        self._scatters.begin_step(1, 0, logical_ranks=self._world.size)
        self._units.gradients.begin_step()
        with set_gradients_aside(list(self._model.parameters())), self._units.order.step():
            try:
                return backward(batch, 1.0)
            finally:
                kept.restore()

    @contextmanager
    def observe_gradients(self, observe: Observe) -> Iterator[None]:
        model = getattr(self._model, "model", self._model)
        scalars = [(name, each) for name, each in model.named_parameters() if not isinstance(each, DTensor)]
        with self._scatters.observe_units(observe), observe_parameters(scalars, observe):
            yield

    def compute_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of full gradients, gathered one by one, with an unsharded model's bits."""
        gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
        full = (gather_full_tensor(each) if isinstance(each, DTensor) else each for each in gradients)
        norm: Tensor = torch.linalg.vector_norm(torch.stack([compute_aligned_norm(gradient) for gradient in full]))
        return norm


def _is_one_short(batches: Sequence[MicroBatch], logical_ranks: int, ranks: int) -> bool:
    """Return whether other ranks have one more logical rank than this one."""
    return len(batches) < -(-logical_ranks // ranks)
