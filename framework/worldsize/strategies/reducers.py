"""Factories of gradient reducers for unsharded models, with one or several updates per step.

Several updates are reduced without DistributedDataParallel, because it expects one forward pass of the whole model
and sums its gradients during the backward pass. Here, sums start after the last backward pass of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from worldsize.collectives.group import start_collective
from worldsize.collectives.ordered import LARGEST, Counter, Tree, gather_mean, reduce_ordered, sum_level
from worldsize.collectives.reductions import CODECS, Encoded, RandomK, TopKSum
from worldsize.collectives.staged import Summation, finish_reduction
from worldsize.core import MicroBatch, Reduction, World
from worldsize.strategies.communication_hooks import CompressedHook, PowerSGDHook, Tiers
from worldsize.strategies.ddp_reducers import AllReduceReducer, GatherHook, OrderedReducer
from worldsize.strategies.gradient_reducer import Backward, GradientReducer, pop_gradients
from worldsize.strategies.loss_record import LossRecord

CompressionKind = Literal["none", "bf16", "fp16", "int8", "powersgd", "topk", "randomk"]


@final
@dataclass(frozen=True)
class Compression:
    """The compression options of :class:`~worldsize.strategies.ddp.DDP`."""

    kind: CompressionKind
    powersgd_rank: int
    density: float
    error_feedback: bool

    def summation(self) -> Summation | None:
        """Return a bucket's compressed all-reduce; None without compression or for PowerSGD."""
        if self.kind == "topk":
            return TopKSum(self.density)
        if self.kind == "randomk":
            return RandomK(self.density, keeps_errors=self.error_feedback)
        return Encoded(CODECS[self.kind]) if self.kind in CODECS else None


def gradient_reducer(
    reduce: Reduction, module: nn.Module, group: ProcessGroup | None, logical_ranks: int | None = None
) -> GradientReducer:
    """Create the reducer of ``module``: a model, or DistributedDataParallel with its ``group``.

    ``logical_ranks``: total over all processes, if their shares may differ; None if all have the same number.
    """
    if reduce == "ordered":
        return OrderedReducer(module, group, logical_ranks)
    if group and isinstance(module, DistributedDataParallel) and _is_small(module, dist.get_world_size(group)):
        return AllReduceReducer(module, GatherHook(group), logical_ranks=logical_ranks)
    return AllReduceReducer(module, logical_ranks=logical_ranks)


def interruptible_reducer(
    reduce: Reduction, module: DistributedDataParallel, world: World, logical_ranks: int | None
) -> GradientReducer:
    """Create a reducer that waits in Python, so that waits end with the gang's membership."""
    assert world.group is not None
    if reduce == "ordered" or _is_small(module, world.size):
        return gradient_reducer(reduce, module, world.group, logical_ranks)
    return AllReduceReducer(module, CompressedHook(module, world, None, None), logical_ranks=logical_ranks)


def _is_small(module: nn.Module, size: int) -> bool:
    """Return whether gathering gradients from ``size`` ranks is faster than an all-reduce."""
    gradients = [parameter for parameter in module.parameters() if parameter.requires_grad]
    on_cpu = all(parameter.device.type == "cpu" for parameter in gradients)
    return on_cpu and size * sum(parameter.nbytes for parameter in gradients) <= LARGEST


def create_compressed_reducer(
    reduce: Reduction, compression: Compression, module: DistributedDataParallel, world: World, *, seed: int
) -> GradientReducer:
    """Create the reducer that compresses all sums, or if hierarchical, those of the last tier.

    ``seed`` is the run's seed.
    """
    tiers = Tiers.from_world(world) if reduce == "hierarchical" else None
    if compression.kind == "powersgd":
        return AllReduceReducer(module, PowerSGDHook(module, world, rank=compression.powersgd_rank, tiers=tiers))
    if compression.kind == "none" and tiers is None:
        return gradient_reducer(reduce, module, world.group)
    return AllReduceReducer(module, CompressedHook(module, world, compression.summation(), tiers, seed=seed))


BUCKET_MB = 25.0


def update_reducer(
    reduce: Reduction, model: nn.Module, group: ProcessGroup | None, *, bucket_mb: float = BUCKET_MB
) -> GradientReducer:
    """Create the reducer of a recipe with several updates.

    ``group``: the ranks with copies of ``model``, or None for this rank alone. ``bucket_mb``: size of a bucket in MiB.
    """
    kind = OrderedUpdateReducer if reduce == "ordered" else FlatUpdateReducer
    return kind(model, group, bucket_bytes=int(bucket_mb * 2**20))


@final
class FlatUpdateReducer(GradientReducer):
    """Sums micro-batches in order, then over processes with torch's all-reduce."""

    def __init__(self, model: nn.Module, group: ProcessGroup | None, *, bucket_bytes: int) -> None:
        self._model, self._group, self._bucket_bytes = model, group, bucket_bytes

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        losses = [backward(batch, 1 / len(batches)) for batch in batches]
        if self._group is not None:
            gradients = [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
            for bucket in _split_buckets(gradients, self._bucket_bytes):
                self._average_gradients(bucket, self._group)
        return losses

    def _average_gradients(self, bucket: Sequence[Tensor], group: ProcessGroup) -> None:
        row_n, size = _flatten_tensors(bucket), dist.get_world_size(group)
        if row_n.device.type == "cpu" and size * row_n.nbytes <= LARGEST:
            gather_mean(row_n, group)
        else:
            start_collective(dist.all_reduce, row_n, group=group).wait()
            row_n.div_(size)
        _apply_to_parts(row_n, bucket, lambda gradient, mean: gradient.copy_(mean))


@final
class OrderedUpdateReducer(GradientReducer):
    """Fixed-tree sums (:mod:`worldsize.collectives.ordered`): same bits at every world size."""

    @property
    def is_ordered(self) -> bool:
        return True

    def __init__(self, model: nn.Module, group: ProcessGroup | None, *, bucket_bytes: int) -> None:
        self._model, self._group, self._bucket_bytes = model, group, bucket_bytes
        self._size = dist.get_world_size(group) if group else 1

    def run(self, batches: Sequence[MicroBatch], backward: Backward) -> list[LossRecord]:
        tree, losses = Tree(len(batches) * self._size, self._size), dict[int, LossRecord]()
        counters = [Counter() for _ in range(tree.local_nodes)]
        parameters: list[nn.Parameter] = []
        for node, counter in enumerate(counters):
            for leaf in tree.list_leaves(node):
                losses[leaf] = backward(batches[leaf], 1.0)
                parameters = [parameter for parameter in self._model.parameters() if parameter.grad is not None]
                counter.add(pop_gradients(parameters))
        nodes = [counter.waiting[0] for counter in counters]
        for bucket in _split_buckets(parameters, self._bucket_bytes):
            rows, nodes = (
                [_flatten_tensors(node[: len(bucket)]) for node in nodes],
                [node[len(bucket) :] for node in nodes],
            )
            total = finish_reduction(reduce_ordered(rows, self._group)) if self._group else sum_level(rows)
            _apply_to_parts(total / tree.logical_ranks, bucket, _set_gradient)
        return [losses[leaf] for leaf in range(len(batches))]


def _set_gradient(parameter: Tensor, gradient: Tensor) -> None:
    parameter.grad = gradient


def _split_buckets(tensors: Sequence[Tensor], most: int) -> Iterator[Sequence[Tensor]]:
    """Split into buckets of one dtype and at most ``most`` bytes, or a single larger tensor."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.nbytes > most):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _flatten_tensors(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _apply_to_parts(row_n: Tensor, like: Sequence[Tensor], put: Callable[[Tensor, Tensor], object]) -> None:
    """Call ``put`` with each tensor of ``like`` and its slice of ``row_n``, in the same shape."""
    parts = torch.split(row_n, [tensor.numel() for tensor in like])
    for tensor, part in zip(like, parts, strict=True):
        put(tensor, part.view_as(tensor))
