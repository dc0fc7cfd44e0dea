"""Makes the gradient reducer for a strategy's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel

from worldsize.core import Reduction, World
from worldsize.dist.codecs import CODECS
from worldsize.dist.gathered import is_small
from worldsize.dist.reductions import Encoded
from worldsize.dist.sparse import RandomK, TopK
from worldsize.dist.summation import Summation
from worldsize.strategies.all_reduce_reducer import AllReduceReducer, GatherHook
from worldsize.strategies.compressed_hook import CompressedHook
from worldsize.strategies.gradient_reducer import GradientReducer
from worldsize.strategies.ordered_reducer import OrderedReducer
from worldsize.strategies.powersgd_hook import PowerSGDHook
from worldsize.strategies.tiers import Tiers

CompressionKind = Literal["none", "bf16", "fp16", "int8", "powersgd", "topk", "randomk"]


@final
@dataclass(frozen=True)
class Compression:
    """Describes how gradients are compressed, by the options of :class:`~worldsize.strategies.ddp.DDP`."""

    kind: CompressionKind
    powersgd_rank: int
    density: float
    error_feedback: bool

    def summation(self) -> Summation | None:
        """Return how a bucket is summed; None: uncompressed."""
        if self.kind == "topk":
            return TopK(self.density)
        if self.kind == "randomk":
            return RandomK(self.density, keeps_errors=self.error_feedback)
        return Encoded(CODECS[self.kind]) if self.kind in CODECS else None


def gradient_reducer(
    reduce: Reduction, module: nn.Module, group: ProcessGroup | None, logical_ranks: int | None = None
) -> GradientReducer:
    """Make the reducer of ``module``: a model, or the DistributedDataParallel around it with its ``group``.

    ``logical_ranks``: those of all processes, which may have different numbers of them; None: all have equally many.
    """
    if reduce == "ordered":
        return OrderedReducer(module, group, logical_ranks)
    if group and isinstance(module, DistributedDataParallel) and is_small(module, dist.get_world_size(group)):
        return AllReduceReducer(module, GatherHook(group), logical_ranks=logical_ranks)
    return AllReduceReducer(module, logical_ranks=logical_ranks)


def interruptible_reducer(
    reduce: Reduction, module: DistributedDataParallel, world: World, logical_ranks: int | None
) -> GradientReducer:
    """Make a reducer that waits for peers in Python, where it learns of the end of its gang; DDP's own does not."""
    assert world.group is not None
    if reduce == "ordered" or is_small(module, world.size):
        return gradient_reducer(reduce, module, world.group, logical_ranks)
    return AllReduceReducer(module, CompressedHook(module, world, None, None), logical_ranks=logical_ranks)


def compressed_reducer(
    reduce: Reduction, compression: Compression, module: DistributedDataParallel, world: World, *, seed: int
) -> GradientReducer:
    """Make the reducer over ``world`` that compresses sums; with "hierarchical", only those of the last tier.

    ``seed`` is that of the run.
    """
    tiers = Tiers.of(world) if reduce == "hierarchical" else None
    if compression.kind == "powersgd":
        return AllReduceReducer(module, PowerSGDHook(module, world, rank=compression.powersgd_rank, tiers=tiers))
    if compression.kind == "none" and tiers is None:
        return gradient_reducer(reduce, module, world.group)
    return AllReduceReducer(module, CompressedHook(module, world, compression.summation(), tiers, seed=seed))
