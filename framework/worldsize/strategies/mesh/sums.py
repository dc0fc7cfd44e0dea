"""Gradient accumulation over a pipeline's micro-batches, and gradient norms over a mesh.

Gradients are summed in torch's order, or in the fixed tree over logical ranks. If all data-parallel parts gather
parameters for every pass, they need the same number of passes per step. A part with one micro-batch fewer then starts
with an idle pass: it computes its first micro-batch an extra time, without effect. In the norm of a gradient sharded
over a mesh, every shard counts once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from worldsize.collectives.gather_full import gather_full_tensor
from worldsize.collectives.group import start_collective
from worldsize.collectives.ordered import Counter, Tree, sum_level
from worldsize.collectives.per_rank import get_local_shard
from worldsize.core import Reduction, World
from worldsize.strategies.gradient_reducer import Presence, clip_factor, compute_aligned_norm, pop_gradients
from worldsize.strategies.mesh.layout import parse_axis
from worldsize.strategies.mesh.tied import Tied, TiedGradients
from worldsize.strategies.step_buffers import BufferMean, StepBuffers
from worldsize.strategies.unit_collectives import OrderedScatters
from worldsize.strategies.unit_gradients import UnitGradients


@final
@dataclass(frozen=True)
class DataParts:
    """The distribution of a step's logical ranks (micro-batches) over data-parallel parts.

    Attributes:
        group: The ranks with the same stages, one per part; the rank in this group is the index of the part.
        reduce: Order of sums.
        logical_ranks: Total over all parts, if their shares may differ; None if all have the same number.
        equal_passes: Whether all parts need the same number of passes per step.
        copies: The ranks with the same shards; None if there is only one copy.
    """

    group: ProcessGroup
    reduce: Reduction
    logical_ranks: int | None
    equal_passes: bool
    copies: ProcessGroup | None = None

    def build_tree(self, count: int) -> Tree:
        """Return the summation tree of a step's logical ranks, with ``count`` on this part."""
        size = self.group.size()
        return Tree(self.logical_ranks or count * size, size)

    def count_idle_passes(self, count: int) -> int:
        """Return the number of idle passes, 0 or 1, before this part's ``count`` micro-batches."""
        if not self.equal_passes or self.logical_ranks is None:
            return 0
        return -(-self.logical_ranks // self.group.size()) - count

    def order_micro_batches(self, count: int) -> Sequence[int]:
        """Return the order in which this part's ``count`` micro-batches are computed, as indices.

        In this order, :class:`TreeSums` holds few partial sums.
        """
        if self.reduce != "ordered":
            return range(count)
        tree = self.build_tree(count)
        return [leaf for node in range(tree.count_nodes(self.group.rank())) for leaf in tree.list_leaves(node)]

    def get_loss_divisor(self, count: int) -> float:
        """Return the divisor of each loss that turns summed gradients into means.

        It is 1 if :class:`TreeSums` divides the sum instead.
        """
        return 1.0 if self.reduce == "ordered" else self.build_tree(count).logical_ranks / self.group.size()

    def create_sums(self, stage: nn.Module, tied: Sequence[Tied]) -> StageSums:
        """Create the sums of one stage, after its parameters have been sharded.

        ``tied``: parameters of this rank that other stages hold, too.
        """
        if self.reduce != "ordered":
            return FlatSums(stage, self)
        return TreeSums(stage, self, TiedGradients(stage, tied))


class StageSums(ABC):
    """Abstract base: accumulates one stage's gradients over micro-batches, except idle passes.

    The schedule reports each completed pass; forward and backward passes have the same order.
    """

    by_micro_batch = False
    """Whether :meth:`record_backward` needs the gradients of each micro-batch separately."""

    @abstractmethod
    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        """Enter a step of ``count`` micro-batches; at its end, parameters have their full gradients."""

    @abstractmethod
    def begin_passes(self) -> None:
        """Discard the changes of torch's shape-inference pass, before the passes of the step."""

    @abstractmethod
    def record_forward(self, place: int) -> None:
        """Record that forward pass ``place``, counted from 0 including idle passes, is done."""

    @abstractmethod
    def record_backward(self, *, is_passed_on: bool = False) -> None:
        """Record that the next backward pass is done, and add its gradients.

        ``is_passed_on``: whether the previous stage already has the gradient of its output.
        """


@final
class FlatSums(StageSums):
    """Leaves the sums to autograd and FSDP.

    The pipeline multiplies the loss of an idle pass by 0; this class undoes its buffer changes. Statistics of norm
    layers carry over from one micro-batch to the next, and the pipeline averages them over data-parallel parts.
    """

    def __init__(self, stage: nn.Module, parts: DataParts) -> None:
        self._all, self._parts = list(stage.buffers()), parts
        self._gradients = UnitGradients(stage, parts.group)
        group = parts.group if parts.group.size() > 1 else None
        self._buffers = BufferMean(stage, group, logical_ranks=parts.logical_ranks, skips_norms=True)
        self._step: StepBuffers | None = None  # buffers of the current step
        self._first: list[Tensor] = []  # values of all buffers before an idle pass, if any
        self._idle = 0  # number of idle passes in the step

    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        self._idle = self._parts.count_idle_passes(count)
        self._first = [buffer.clone() for buffer in self._all] if self._idle else []
        self._gradients.begin_step(counts=False)
        with self._buffers.step(count) as self._step:
            yield
        self._gradients.remove_missing()
        self._step = None

    def begin_passes(self) -> None:
        assert self._step is not None
        self._step.restore()
        self._gradients.begin_step()

    def record_forward(self, place: int) -> None:
        assert self._step is not None
        if place < self._idle:
            self._step.restore()
        else:
            self._step.add(place - self._idle)
        for buffer, value in zip(self._all, self._first, strict=False):
            buffer.data.copy_(value)  # .data keeps the autograd graph valid
        self._first = []

    def record_backward(self, *, is_passed_on: bool = False) -> None: ...


@final
class TreeSums(StageSums):
    """Sums in the fixed tree, with the same bits for any number of data-parallel parts.

    If the stage is sharded, FSDP units compute the sums in place of torch's reduce-scatter. Otherwise there is only one
    part, and the gradients of each micro-batch are moved from the parameters to the tree.
    """

    by_micro_batch = True

    def __init__(self, stage: nn.Module, parts: DataParts, tied: TiedGradients) -> None:
        self._stage, self._parts, self._tied = stage, parts, tied
        is_sharded = isinstance(stage, FSDPModule)
        self._scatters = OrderedScatters(stage, parts.group, parts.copies) if is_sharded else None
        self._gradients = UnitGradients(stage, parts.group)
        self._presence = Presence(())  # of the stage's gradients in this step, unless sharded
        group = parts.group if parts.group.size() > 1 else None
        self._buffers = BufferMean(stage, group, logical_ranks=parts.logical_ranks)
        self._step: StepBuffers | None = None  # buffers of the current step
        self._order: Sequence[int] = ()
        self._counters: list[Counter] = []  # one per tree node of this rank
        self._idle = self._taken = 0  # number of idle passes in the step, and of backward passes so far

    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        tree = self._parts.build_tree(count)
        nodes = tree.count_nodes(self._parts.group.rank())
        self._order, self._counters = self._parts.order_micro_batches(count), [Counter() for _ in range(nodes)]
        self._idle, self._taken = self._parts.count_idle_passes(count), 0
        self._begin_scatters(0 if self._idle else count)
        self._gradients.begin_step(counts=False)
        self._presence = Presence(self._get_trainable_parameters() if self._scatters is None else ())
        with self._buffers.step(count) as self._step:
            yield
        self._tied.finish()
        self._gradients.remove_missing()
        if self._scatters is None:
            self._finish_alone(tree.logical_ranks)
        self._step, self._counters = None, []  # release gradients

    def begin_passes(self) -> None:
        assert self._step is not None
        self._step.restore()
        self._gradients.begin_step()

    def record_forward(self, place: int) -> None:
        assert self._step is not None
        self._tied.send_held()
        if place < self._idle:
            self._step.restore()
        else:
            self._step.add(self._order[place - self._idle])

    def record_backward(self, *, is_passed_on: bool = False) -> None:
        self._taken += 1
        done, count = self._taken - self._idle, len(self._order)
        self._tied.exchange()
        if is_passed_on:
            self._tied.send_held()
        if self._scatters is None:  # a single part, without idle passes
            self._presence.record_gradients()
            self._counters[(done - 1) // (count // len(self._counters))].add(
                pop_gradients(self._get_trainable_parameters())
            )
            return
        assert isinstance(self._stage, FSDPModule)
        self._stage.set_requires_gradient_sync(True)
        self._stage.set_reshard_after_backward(False)
        for module in self._stage.modules():
            if isinstance(module, FSDPModule):
                _reduce_scatter_gradients(module, is_last=done == count)
        if done == 0:
            self._begin_scatters(count)  # the gradients so far came from idle passes
        else:
            self._scatters.end_pass(done)

    def _begin_scatters(self, micro_batches: int) -> None:
        """Count the next gradients as those of ``micro_batches`` micro-batches, or ignore them if 0."""
        if self._scatters:
            logical_ranks = self._parts.build_tree(len(self._order)).logical_ranks
            self._scatters.begin_step(len(self._counters), micro_batches, logical_ranks=logical_ranks)

    def _finish_alone(self, logical_ranks: int) -> None:
        sums = [counter.waiting[0] for counter in self._counters]
        for index, (parameter, *nodes) in enumerate(zip(self._get_trainable_parameters(), *sums, strict=True)):
            if index in self._presence.absent:
                continue
            parameter.grad = sum_level(nodes) / logical_ranks

    def _get_trainable_parameters(self) -> list[nn.Parameter]:
        return [each for each in self._stage.parameters() if each.requires_grad]


def _reduce_scatter_gradients(module: FSDPModule, *, is_last: bool) -> None:
    """Let an FSDP unit reduce-scatter the gradients of a backward pass.

    Before the last pass of a step, the reduce-scatter only accumulates, and its result is dropped.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group.post_backward()
        if not is_last:
            for parameter in group.fsdp_params:
                parameter.sharded_param.grad = None


def find_sharded_axes(tensor: Tensor) -> set[str]:
    """Return the names of the mesh axes over which ``tensor``, of any shape, is sharded."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    placements = zip(names, tensor.placements, strict=True)
    return {parse_axis(name) for name, placement in placements if not placement.is_replicate()}


@final
class MeshNorm:
    """Computes the gradient norm over all ranks of ``world``, and clips by it.

    ``coordinate``: this rank's coordinate on each axis over which parameters may be sharded; only the first rank with
    a shard counts it. ``spare``: parameters that an earlier stage also holds, and counts.
    """

    def __init__(self, world: World, coordinate: Mapping[str, int], spare: Collection[Tensor] = ()) -> None:
        self._world, self._coordinate = world, coordinate
        self._spare = {id(parameter) for parameter in spare}

    def compute_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of the gradients of ``parameters``, a scalar equal on all ranks."""
        squares = torch.zeros((), dtype=torch.float64, device=self._world.device)
        gradients = [
            get_local_shard(own.grad) for own in parameters if own.grad is not None and self._should_count(own)
        ]
        if gradients:
            squares += torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        start_collective(dist.all_reduce, squares, group=self._world.group).wait()
        return squares.sqrt().float()

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Clip the norm to ``limit``; return the norm before clipping, a scalar equal on all ranks."""
        trained = [own for own in parameters if own.grad is not None]
        norm = self.compute_norm(trained)
        if limit < float("inf") and trained:
            torch._foreach_mul_(
                [get_local_shard(own.grad) for own in trained if own.grad is not None], clip_factor(norm, limit)
            )
        return norm

    def _should_count(self, parameter: nn.Parameter) -> bool:
        shared = self._coordinate.keys() - find_sharded_axes(parameter)
        return id(parameter) not in self._spare and all(self._coordinate[axis] == 0 for axis in shared)


@final
@dataclass(frozen=True)
class WholeNorm:
    """Computes the norm of full gradients, and clips by it.

    The bits are the same for any data-parallel sharding.

    ``pipeline``: the ranks that hold the other stages, or None if there are none. ``spare``: parameters that an
    earlier stage also holds, and counts.
    """

    device: torch.device
    pipeline: ProcessGroup | None = None
    spare: Collection[Tensor] = ()

    def compute_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of the gradients of ``parameters``, a scalar equal on all ranks."""
        norm: Tensor = torch.linalg.vector_norm(self._compute_norms(list(parameters)))
        return norm

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Clip the norm to ``limit``; return the norm before clipping, a scalar equal on all ranks."""
        trained = list(parameters)
        norm = self.compute_norm(trained)
        gradients = [get_local_shard(own.grad) for own in trained if own.grad is not None]
        if limit < float("inf") and gradients:
            torch._foreach_mul_(gradients, clip_factor(norm, limit))
        return norm

    def _compute_norms(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the norms (n,) of the existing gradients of all stages' ``parameters``."""
        spare = {id(each) for each in self.spare}
        norms = {
            place: compute_aligned_norm(gather_full_tensor(own.grad) if isinstance(own.grad, DTensor) else own.grad)
            for place, own in enumerate(parameters)
            if own.grad is not None and id(own) not in spare
        }
        if self.pipeline is None:
            return torch.stack(list(norms.values()))
        table_2n = torch.zeros(2, len(parameters), device=self.device)  # the norms, and whether they exist
        for place, norm in norms.items():
            table_2n[0, place], table_2n[1, place] = norm, 1
        start_collective(dist.all_reduce, table_2n, group=self.pipeline).wait()
        return table_2n[0][table_2n[1] > 0]
