"""Sums over logical slices that several ranks hold, in one fixed tree.

Slice 2i is added to slice 2i + 1, and so on with the sums. A rank holds 2^k consecutive slices, so the first
levels of the tree are local; results have the same bits at every number of ranks. In half precision, sums are
taken in float32, and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from worldsize.collectives.group import start_collective


def sum_slices(parts: Iterable[Tensor], count: int, group: ProcessGroup | None, *, is_ordered: bool) -> Tensor:
    """Return the sum of ``parts``, this rank's ``count`` slices, over all ranks of ``group``.

    All slices and the result have the same shape. ``is_ordered``: sum in the fixed tree; otherwise in the order of the
    backend.
    """
    total, dtype = _sum_own(parts, count)
    if group is None:
        return total.to(dtype)
    if not is_ordered or group.size() == 2:  # a sum of two does not depend on the order
        total = total.clone(memory_format=torch.contiguous_format)
        start_collective(dist.all_reduce, total, group=group).wait()
        return total.to(dtype)
    size, shard = group.size(), -(-total.numel() // group.size())
    mine_ps = F.pad(total.flatten(), (0, size * shard - total.numel())).view(size, shard)
    total_s = _sum_shards(mine_ps, group).to(dtype)
    total_n = total_s.new_empty(size * shard)
    start_collective(dist.all_gather_into_tensor, total_n, total_s, group=group).wait()
    return total_n[: total.numel()].view_as(total)


def scatter_slices(parts: Iterable[Tensor], count: int, group: ProcessGroup | None) -> Tensor:
    """Return this rank's rows of the sum of ``parts`` over all ranks.

    ``parts``: ``count`` tensors of shape (rows, ...). Each rank gets an equal number of consecutive rows. Sums are
    taken in the tree of :func:`sum_slices`.
    """
    total, dtype = _sum_own(parts, count)
    if group is None:
        return total.to(dtype)
    size = group.size()
    own_s = _sum_shards(total.reshape(size, -1), group).to(dtype)
    return own_s.view(len(total) // size, *total.shape[1:])


def _sum_own(parts: Iterable[Tensor], count: int) -> tuple[Tensor, torch.dtype]:
    """Return the sum of this rank's ``count`` parts, not rounded yet, and their dtype."""
    others = iter(parts)
    first = next(others)
    total = first if count == 1 else sum_pairs(_widen(part) for part in chain([first], others))
    return total, first.dtype


def _sum_shards(mine_ps: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's shard (s,) of the sum over all ranks' ``mine_ps``, in pairs."""
    theirs_ps = torch.empty_like(mine_ps)
    start_collective(dist.all_to_all_single, theirs_ps, mine_ps, group=group).wait()
    return sum_pairs(_widen(each) for each in theirs_ps)


def sum_pairs(nodes: Iterable[Tensor]) -> Tensor:
    """Sum 2^k tensors of the same shape in pairs of neighbors, with few partial sums in memory."""
    sums: list[tuple[int, Tensor]] = []  # number of nodes and their sum, largest first
    for node in nodes:
        size, total = 1, node
        while sums and sums[-1][0] == size:
            total = sums.pop()[1] + total
            size *= 2
        sums.append((size, total))
    ((_, total),) = sums
    return total


def _widen(part: Tensor) -> Tensor:
    return part.float() if part.dtype in (torch.bfloat16, torch.float16) else part
