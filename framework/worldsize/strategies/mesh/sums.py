"""Adds up the gradients of a pipeline's micro-batches, in torch's order or in the fixed tree, and takes their norm.

The tree is over logical ranks. Where the ranks of all data-parallel parts gather parameters for every pass, all parts
need equally many passes in a step. A part with one micro-batch less than others then begins with an idle pass: it
computes its first micro-batch once more, without effect. In the norm of a gradient that is sharded over a mesh, every
part counts once.
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

from worldsize.collectives.gather_full import whole
from worldsize.collectives.ordered import Counter, Tree, sum_level
from worldsize.collectives.per_rank import local
from worldsize.collectives.step_timer import wait
from worldsize.core import Reduction, World
from worldsize.strategies.gradient_reducer import Presence, aligned_norm, clip_factor, taken
from worldsize.strategies.mesh.layout import axis_of
from worldsize.strategies.step_buffers import BufferMean, StepBuffers
from worldsize.strategies.unit_collectives import OrderedScatters
from worldsize.strategies.unit_gradients import UnitGradients


@final
@dataclass(frozen=True)
class DataParts:
    """Describes how data-parallel parts share the logical ranks of a step, each of which is a micro-batch of one part.

    Attributes:
        group: The ranks with the same stages as this one, one of each part; this part's number is the rank there.
        reduce: Order of sums.
        logical_ranks: Those of all parts, which may have different numbers of them; None: all have equally many.
        equal_passes: Whether all parts need equally many passes in a step.
    """

    group: ProcessGroup
    reduce: Reduction
    logical_ranks: int | None
    equal_passes: bool

    def tree(self, count: int) -> Tree:
        """Return the tree of sums over all logical ranks of a step in which this part has ``count`` micro-batches."""
        size = self.group.size()
        return Tree(self.logical_ranks or count * size, size)

    def idle(self, count: int) -> int:
        """Return the number of idle passes, 1 or 0, with which a step of ``count`` micro-batches here begins."""
        if not self.equal_passes or self.logical_ranks is None:
            return 0
        return -(-self.logical_ranks // self.group.size()) - count

    def order(self, count: int) -> Sequence[int]:
        """Return the indices of this part's ``count`` micro-batches in the order in which they pass the stages.

        In this order, :class:`TreeSums` needs to keep few partial sums.
        """
        if self.reduce != "ordered":
            return range(count)
        tree = self.tree(count)
        return [leaf for node in range(tree.nodes_of(self.group.rank())) for leaf in tree.leaves(node)]

    def divisor(self, count: int) -> float:
        """Return the number by which each loss is divided before its backward pass, so that gradients are means.

        It is 1 where :class:`TreeSums` divides the sum instead.
        """
        return 1.0 if self.reduce == "ordered" else self.tree(count).logical_ranks / self.group.size()

    def sums(self, stage: nn.Module) -> StageSums:
        """Make the sums of one stage, after its parameters have been divided among the ranks."""
        return TreeSums(stage, self) if self.reduce == "ordered" else FlatSums(stage, self)


class StageSums(ABC):
    """Adds up the gradients of the micro-batches that pass one stage, without those of idle passes.

    A schedule tells it of each pass that it has computed; forward and backward passes each come in the same order.
    """

    @abstractmethod
    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        """Enter a step of ``count`` micro-batches; when it ends, parameters have the gradients of the whole step."""

    @abstractmethod
    def begin_passes(self) -> None:
        """Begin the passes that count, and restore buffers: torch makes one to learn the shapes of messages."""

    @abstractmethod
    def forwarded(self, place: int) -> None:
        """Record that forward pass ``place`` of the step, counted from 0 with idle passes, has been computed."""

    @abstractmethod
    def backwarded(self) -> None:
        """Record that the next backward pass has been computed, and add the gradients that it has left."""


@final
class FlatSums(StageSums):
    """Leaves the sums to autograd and FSDP.

    The loss of an idle pass is multiplied by 0; here its changes of buffers are undone. The statistics of norm layers
    go from one micro-batch to the next, and the pipeline averages them over parts of the data.
    """

    def __init__(self, stage: nn.Module, parts: DataParts) -> None:
        self._all, self._parts = list(stage.buffers()), parts
        self._gradients = UnitGradients(stage, parts.group)
        group = parts.group if parts.group.size() > 1 else None
        self._buffers = BufferMean(stage, group, logical_ranks=parts.logical_ranks, skips_norms=True)
        self._step: StepBuffers | None = None  # the buffers in the step in progress
        self._first: list[Tensor] = []  # if the step has an idle pass: values of all buffers before it
        self._idle = 0  # idle passes of the step

    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        self._idle = self._parts.idle(count)
        self._first = [buffer.clone() for buffer in self._all] if self._idle else []
        self._gradients.begin(counts=False)
        with self._buffers.step(count) as self._step:
            yield
        self._gradients.finish()
        self._step = None

    def begin_passes(self) -> None:
        assert self._step is not None
        self._step.restore()
        self._gradients.begin()

    def forwarded(self, place: int) -> None:
        assert self._step is not None
        if place < self._idle:
            self._step.restore()
        else:
            self._step.add(place - self._idle)
        for buffer, value in zip(self._all, self._first, strict=False):
            buffer.data.copy_(value)  # through .data, so that autograd's graph stays valid
        self._first = []

    def backwarded(self) -> None: ...


@final
class TreeSums(StageSums):
    """Sums in the fixed tree, with the same bits for any number of data-parallel parts.

    If the stage is sharded, the units of FSDP sum where they would call torch's reduce-scatter; otherwise there is one
    part, and the gradients of each micro-batch are taken from the parameters.
    """

    def __init__(self, stage: nn.Module, parts: DataParts) -> None:
        self._stage, self._parts = stage, parts
        is_sharded = isinstance(stage, FSDPModule)
        self._scatters = OrderedScatters(stage, parts.group) if is_sharded else None
        self._gradients = UnitGradients(stage, parts.group)
        self._presence = Presence(())  # of the stage's gradients in the step, if it is not sharded
        group = parts.group if parts.group.size() > 1 else None
        self._buffers = BufferMean(stage, group, logical_ranks=parts.logical_ranks)
        self._step: StepBuffers | None = None  # the buffers in the step in progress
        self._order: Sequence[int] = ()
        self._counters: list[Counter] = []  # one for each node of the tree that this rank sums
        self._idle = self._taken = 0  # idle passes of the step, and backward passes so far

    @contextmanager
    def step(self, count: int) -> Iterator[None]:
        tree = self._parts.tree(count)
        nodes = tree.nodes_of(self._parts.group.rank())
        self._order, self._counters = self._parts.order(count), [Counter() for _ in range(nodes)]
        self._idle, self._taken = self._parts.idle(count), 0
        self._begin_scatters(0 if self._idle else count)
        self._gradients.begin(counts=False)
        self._presence = Presence(self._trained() if self._scatters is None else ())
        with self._buffers.step(count) as self._step:
            yield
        self._gradients.finish()
        if self._scatters is None:
            self._finish_alone(tree.logical_ranks)
        self._step, self._counters = None, []  # releases gradients

    def begin_passes(self) -> None:
        assert self._step is not None
        self._step.restore()
        self._gradients.begin()

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
            self._presence.note()
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
            self._scatters.end_pass(done)

    def _begin_scatters(self, micro_batches: int) -> None:
        """Let the next gradients count as those of so many micro-batches of the step; 0: as nothing."""
        if self._scatters:
            logical_ranks = self._parts.tree(len(self._order)).logical_ranks
            self._scatters.begin(len(self._counters), micro_batches, logical_ranks=logical_ranks)

    def _finish_alone(self, logical_ranks: int) -> None:
        sums = [counter.waiting[0] for counter in self._counters]
        for index, (parameter, *nodes) in enumerate(zip(self._trained(), *sums, strict=True)):
            if index in self._presence.absent:
                continue
            total = sum_level(nodes) / logical_ranks
            # a gradient that is there by now is that of another stage of this rank, which shares the parameter
            parameter.grad = total if parameter.grad is None else parameter.grad + total

    def _trained(self) -> list[nn.Parameter]:
        return [each for each in self._stage.parameters() if each.requires_grad]


def _reduce(module: FSDPModule, *, is_last: bool) -> None:
    """Let a unit of FSDP call its reduce-scatter for the gradients that a backward pass has left.

    Before the last pass of a step this only adds them up, and what it returns is dropped.
    """
    for group in module._get_fsdp_state()._fsdp_param_groups:
        group.post_backward()
        if not is_last:
            for parameter in group.fsdp_params:
                parameter.sharded_param.grad = None


def sharded_axes(tensor: Tensor) -> set[str]:
    """Return the names of the mesh axes along which ``tensor``, of any shape, is sharded."""
    if not isinstance(tensor, DTensor):
        return set()
    names = tensor.device_mesh.mesh_dim_names or ()
    placements = zip(names, tensor.placements, strict=True)
    return {axis_of(name) for name, placement in placements if not placement.is_replicate()}


@final
class MeshNorm:
    """Clips by the norm over all ranks of ``world``.

    ``coordinate``: coordinate of this rank on each axis along which parameters may be sharded; if several ranks hold
    the same part, the first one counts it. ``spare``: parameters that an earlier stage also holds, and counts.
    """

    def __init__(self, world: World, coordinate: Mapping[str, int], spare: Collection[Tensor] = ()) -> None:
        self._world, self._coordinate = world, coordinate
        self._spare = {id(parameter) for parameter in spare}

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients to a norm of at most ``limit``; return the norm before, a scalar equal on all ranks."""
        trained = [own for own in parameters if own.grad is not None]
        norm = self._norm([local(own.grad) for own in trained if own.grad is not None and self._counts(own)])
        if limit < float("inf") and trained:
            torch._foreach_mul_([local(own.grad) for own in trained if own.grad is not None], clip_factor(norm, limit))
        return norm

    def _counts(self, parameter: nn.Parameter) -> bool:
        shared = self._coordinate.keys() - sharded_axes(parameter)
        return id(parameter) not in self._spare and all(self._coordinate[axis] == 0 for axis in shared)

    def _norm(self, gradients: Sequence[Tensor]) -> Tensor:
        squares = torch.zeros((), dtype=torch.float64, device=self._world.device)
        if gradients:
            squares += torch.stack(torch._foreach_norm(list(gradients))).double().square().sum()
        wait(dist.all_reduce(squares, group=self._world.group, async_op=True))
        return squares.sqrt().float()


@final
@dataclass(frozen=True)
class WholeNorm:
    """Clips by the norm of full gradients, with the same bits for any number of data-parallel parts.

    ``pipeline``: the ranks that hold the other stages (None: there are none); ``spare``: parameters that an earlier
    stage also holds, and counts.
    """

    device: torch.device
    pipeline: ProcessGroup | None = None
    spare: Collection[Tensor] = ()

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        """Scale the gradients to a norm of at most ``limit``; return the norm before, a scalar equal on all ranks."""
        trained = list(parameters)
        norm: Tensor = torch.linalg.vector_norm(self._norms(trained))
        gradients = [local(own.grad) for own in trained if own.grad is not None]
        if limit < float("inf") and gradients:
            torch._foreach_mul_(gradients, clip_factor(norm, limit))
        return norm

    def _norms(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the norm of the gradient of each of ``parameters``, those of all stages, that has one: (n,)."""
        spare = {id(each) for each in self.spare}
        norms = {
            place: aligned_norm(whole(own.grad) if isinstance(own.grad, DTensor) else own.grad)
            for place, own in enumerate(parameters)
            if own.grad is not None and id(own) not in spare
        }
        if self.pipeline is None:
            return torch.stack(list(norms.values()))
        table_2n = torch.zeros(2, len(parameters), device=self.device)  # the norm, and whether there is one
        for place, norm in norms.items():
            table_2n[0, place], table_2n[1, place] = norm, 1
        wait(dist.all_reduce(table_2n, group=self.pipeline, async_op=True))
        return table_2n[0][table_2n[1] > 0]
