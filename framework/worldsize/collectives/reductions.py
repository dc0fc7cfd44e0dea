"""Reductions that send fewer bytes over slow links: first inside each node, or in fewer bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from worldsize.collectives.codecs import Codec
from worldsize.collectives.staged import Phases
from worldsize.collectives.step_timer import wait

Sum = Callable[[Tensor, ProcessGroup], Phases]  # of a flat tensor; may reuse its memory


def all_reduced(flat_n: Tensor, group: ProcessGroup) -> Phases:
    """Sum by torch's all-reduce."""
    work = dist.all_reduce(flat_n, group=group, async_op=True)
    yield
    wait(work)
    return flat_n


def hierarchical(flat_n: Tensor, node: ProcessGroup, across: ProcessGroup, total: Sum) -> Phases:
    """Sum over all ranks, node by node.

    A reduce-scatter inside the node leaves each rank a part, ``total`` sums it with the ranks of the same place on
    other nodes, and an all-gather inside shares the sums. With G ranks a node, each sends 1/G of the bytes across.
    """
    padding = -flat_n.numel() % dist.get_world_size(node)
    padded = F.pad(flat_n, (0, padding)) if padding else flat_n
    part = yield from _scattered(padded, node)
    part = yield from total(part, across)
    work = dist.all_gather_into_tensor(padded, part, group=node, async_op=True)
    yield
    wait(work)
    return padded[: flat_n.numel()] if padding else flat_n


def _scattered(flat_n: Tensor, group: ProcessGroup) -> Phases:
    """Return this rank's part of the sum.

    On the CPU by an all-to-all: gloo's own reduce-scatter is an all-reduce of which most is thrown away.
    """
    size = dist.get_world_size(group)
    if flat_n.device.type == "cpu":
        theirs_n = torch.empty_like(flat_n)
        work = dist.all_to_all_single(theirs_n, flat_n, group=group, async_op=True)
        yield
        wait(work)
        return theirs_n.view(size, -1).sum(0)
    part = flat_n.new_empty(flat_n.numel() // size)
    work = dist.reduce_scatter_tensor(part, flat_n, group=group, async_op=True)
    yield
    wait(work)
    return part


def compressed(flat_n: Tensor, group: ProcessGroup, codec: Codec, error_n: Tensor | None = None) -> Phases:
    """Sum what ``codec`` encodes, in float32: an all-to-all of parts, then an all-gather of their sums.

    Work that does not need a collective's result is done while it is under way, and in place: filling new memory
    takes a CPU several times as long.

    Args:
        error_n: what this rank's earlier messages have left out. It is added first, and replaced by what these
            messages leave out (error feedback, Seide et al. 2014, Interspeech; Karimireddy et al. 2019, arXiv
            1901.09847). The error of the second message, of a sum, belongs to the rank that sends it.
    """
    size = dist.get_world_size(group)
    mine_n = flat_n if error_n is None else error_n.add_(flat_n)
    parts_pn = _in_parts(mine_n, size)
    count = parts_pn.shape[1]
    wire = codec.encode(parts_pn)
    theirs = torch.empty_like(wire)
    work = dist.all_to_all_single(theirs, wire, group=group, async_op=True)
    yield
    if error_n is not None:
        for columns, sent_pk in codec.pieces(wire, count):
            parts_pn[:, columns].sub_(sent_pk)
    wait(work)
    sum_n = flat_n.new_empty(count)
    for columns, summands_pk in codec.pieces(theirs, count):
        torch.sum(summands_pk, 0, out=sum_n[columns])
    wire = codec.encode(sum_n[None])
    whole = wire.new_empty(size, wire.shape[1])
    work = dist.all_gather_into_tensor(whole, wire, group=group, async_op=True)
    yield
    if error_n is not None:
        parts_pn[dist.get_rank(group)] += sum_n - codec.decode(wire, count)[0]
        _put_back(parts_pn, error_n)
    wait(work)
    sums_pn = _in_parts(flat_n, size)
    for columns, sums_pk in codec.pieces(whole, count):
        sums_pn[:, columns] = sums_pk
    return _put_back(sums_pn, flat_n)


def _in_parts(flat_n: Tensor, count: int) -> Tensor:
    """[count, n]: a view where it divides evenly, else a copy, padded."""
    padding = -flat_n.numel() % count
    return (F.pad(flat_n, (0, padding)) if padding else flat_n).view(count, -1)


def _put_back(parts_pn: Tensor, flat_n: Tensor) -> Tensor:
    """Return ``flat_n`` with what was made of its parts."""
    if parts_pn.data_ptr() != flat_n.data_ptr():
        flat_n.copy_(parts_pn.flatten()[: flat_n.numel()])
    return flat_n
