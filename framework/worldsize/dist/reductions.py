"""Reductions that send fewer bytes over slow links: hierarchical (inside nodes first, then racks) and compressed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from worldsize.dist.codecs import Codec
from worldsize.dist.staged import Phases
from worldsize.dist.step_timer import started, wait
from worldsize.dist.summation import Summation

Sum = Callable[[Tensor, ProcessGroup], Phases]  # sums a flat tensor (n,); may reuse its memory


def all_reduced(flat_n: Tensor, group: ProcessGroup) -> Phases:
    """Sum ``flat_n``, of shape (n,), in place by torch's all-reduce."""
    work = started(dist.all_reduce(flat_n, group=group, async_op=True))
    yield
    wait(work)
    return flat_n


def hierarchical(flat_n: Tensor, inner: Sequence[ProcessGroup], across: ProcessGroup, total: Sum) -> Phases:
    """Sum ``flat_n``, of shape (n,), over all ranks, first inside each node, then inside each rack, and so on.

    A reduce-scatter over the first of the ``inner`` groups leaves each rank a shard. It is summed in the same way over
    the other groups, whose ranks have the same shard, and at last by ``total`` over ``across``; then an all-gather over
    the first group distributes the sums. With G ranks in the groups of all inner tiers together, each rank sends 1/G of
    the bytes over the links of the outermost.
    """
    if not inner:
        return (yield from total(flat_n, across))
    padding = -flat_n.numel() % dist.get_world_size(inner[0])
    padded = F.pad(flat_n, (0, padding)) if padding else flat_n
    part = yield from _scattered(padded, inner[0])
    part = yield from hierarchical(part, inner[1:], across, total)
    work = started(dist.all_gather_into_tensor(padded, part, group=inner[0], async_op=True))
    yield
    wait(work)
    return padded[: flat_n.numel()] if padding else flat_n


def _scattered(flat_n: Tensor, group: ProcessGroup) -> Phases:
    """Return this rank's shard of the sum.

    The CPU uses an all-to-all, since gloo's own reduce-scatter is an all-reduce that discards most of its result.
    """
    size = dist.get_world_size(group)
    if flat_n.device.type == "cpu":
        theirs_n = torch.empty_like(flat_n)
        work = started(dist.all_to_all_single(theirs_n, flat_n, group=group, async_op=True))
        yield
        wait(work)
        return theirs_n.view(size, -1).sum(0)
    part = flat_n.new_empty(flat_n.numel() // size)
    work = started(dist.reduce_scatter_tensor(part, flat_n, group=group, async_op=True))
    yield
    wait(work)
    return part


def compressed(flat_n: Tensor, group: ProcessGroup, codec: Codec, error_n: Tensor | None = None) -> Phases:
    """Sum in float32 what ``codec`` encodes: an all-to-all of shards, then an all-gather of their sums.

    Work that does not need a collective's result overlaps with it, and is done in place: writing to newly allocated
    memory takes a CPU several times as long.

    Args:
        flat_n: the numbers of this rank, float32 (n,).
        group: the ranks that take part.
        codec: the wire format of both messages.
        error_n: the compression error of this rank's earlier messages, float32 (n,). It is added first, and replaced by
            the error of these messages (error feedback, Seide et al. 2014, Interspeech; Karimireddy et al. 2019, arXiv
            1901.09847). The error of the second message, of a sum, belongs to the rank that sends it.
    """
    size = dist.get_world_size(group)
    mine_n = flat_n if error_n is None else error_n.add_(flat_n)
    parts_pn = _in_parts(mine_n, size)
    count = parts_pn.shape[1]
    wire = codec.encode(parts_pn)
    theirs = torch.empty_like(wire)
    work = started(dist.all_to_all_single(theirs, wire, group=group, async_op=True))
    yield
    if error_n is not None:
        for columns, sent_pk in codec.pieces(wire, count):
            parts_pn[:, columns].sub_(sent_pk)
    wait(work)
    sum_n = flat_n.new_empty(count)
    for columns, summands_pk in codec.pieces(theirs, count):
        torch.sum(summands_pk, 0, out=sum_n[columns])
    wire = codec.encode(sum_n[None])
    total_pb = wire.new_empty(size, wire.shape[1])
    work = started(dist.all_gather_into_tensor(total_pb, wire, group=group, async_op=True))
    yield
    if error_n is not None:
        parts_pn[dist.get_rank(group)] += sum_n - codec.decode(wire, count)[0]
        _put_back(parts_pn, error_n)
    wait(work)
    sums_pn = _in_parts(flat_n, size)
    for columns, sums_pk in codec.pieces(total_pb, count):
        sums_pn[:, columns] = sums_pk
    return _put_back(sums_pn, flat_n)


@final
class Encoded(Summation):
    """Sums what a codec encodes, see :func:`compressed`."""

    def __init__(self, codec: Codec) -> None:
        self._codec, self.keeps_errors = codec, codec.lossy

    def total(self, flat_n: Tensor, group: ProcessGroup, *, error_n: Tensor | None, seed: int) -> Phases:
        return compressed(flat_n, group, self._codec, error_n)


def _in_parts(flat_n: Tensor, count: int) -> Tensor:
    """Return ``flat_n`` as (count, n / count): a view if it divides evenly, else a padded copy."""
    padding = -flat_n.numel() % count
    return (F.pad(flat_n, (0, padding)) if padding else flat_n).view(count, -1)


def _put_back(parts_pn: Tensor, flat_n: Tensor) -> Tensor:
    """Copy the parts back into ``flat_n``, unless they are views of it, and return it."""
    if parts_pn.data_ptr() != flat_n.data_ptr():
        flat_n.copy_(parts_pn.flatten()[: flat_n.numel()])
    return flat_n
