"""Means over ranks that cost fewer bytes where links are slow: by way of the node, and in fewer bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from worldsize.collectives.codecs import Codec
from worldsize.collectives.staged import Phases, started

Sum = Callable[[Tensor, ProcessGroup], Phases]  # of a flat tensor; may reuse its memory


def all_reduced(flat_n: Tensor, group: ProcessGroup) -> Phases:
    """Torch's own sum."""
    work = started(dist.all_reduce(flat_n, group=group, async_op=True))
    yield
    work.wait()
    return flat_n


def hierarchical(flat_n: Tensor, node: ProcessGroup, across: ProcessGroup, total: Sum) -> Phases:
    """The sum over all ranks: reduce-scatter inside the node, ``total`` of each rank's part with the ranks of its
    place on other nodes, all-gather inside. A rank sends 1/G of the bytes across, with G ranks a node.
    """
    padding = -flat_n.numel() % dist.get_world_size(node)
    padded = F.pad(flat_n, (0, padding)) if padding else flat_n
    part = yield from _scattered(padded, node)
    part = yield from total(part, across)
    work = started(dist.all_gather_into_tensor(padded, part, group=node, async_op=True))
    yield
    work.wait()
    return padded[: flat_n.numel()] if padding else flat_n


def _scattered(flat_n: Tensor, group: ProcessGroup) -> Phases:
    """This rank's part of the sum. gloo's own reduce-scatter is an all-reduce of which most is thrown away."""
    size = dist.get_world_size(group)
    if flat_n.device.type == "cpu":
        theirs_n = torch.empty_like(flat_n)
        work = started(dist.all_to_all_single(theirs_n, flat_n, group=group, async_op=True))
        yield
        work.wait()
        return theirs_n.view(size, -1).sum(0)
    part = flat_n.new_empty(flat_n.numel() // size)
    work = started(dist.reduce_scatter_tensor(part, flat_n, group=group, async_op=True))
    yield
    work.wait()
    return part


def compressed(flat_n: Tensor, group: ProcessGroup, codec: Codec, error_n: Tensor | None = None) -> Phases:
    """The sum, sent as ``codec`` writes it and added up in float32: an all-to-all of parts, then an all-gather.

    ``error_n``: what this rank's earlier messages have left out; added first, and replaced by what these leave out
    (error feedback, Seide et al. 2014, Interspeech; Karimireddy et al. 2019, arXiv 1901.09847). The error of the
    second message, of a sum, is its sender's.
    """
    size, length = dist.get_world_size(group), flat_n.numel()
    if error_n is not None:
        flat_n = flat_n + error_n
    parts_pn = (F.pad(flat_n, (0, -length % size)) if length % size else flat_n).view(size, -1)
    wire = codec.encode(parts_pn)
    theirs = torch.empty_like(wire)
    work = started(dist.all_to_all_single(theirs, wire, group=group, async_op=True))
    yield
    left_pn = parts_pn - codec.decode(wire, parts_pn.shape[1]) if error_n is not None else None
    work.wait()
    sum_n = codec.decode(theirs, parts_pn.shape[1]).sum(0)
    wire = codec.encode(sum_n[None])
    whole = wire.new_empty(size, wire.shape[1])
    work = started(dist.all_gather_into_tensor(whole, wire, group=group, async_op=True))
    yield
    if error_n is not None and left_pn is not None:
        left_pn[dist.get_rank(group)] += sum_n - codec.decode(wire, sum_n.numel())[0]
        error_n.copy_(left_pn.flatten()[:length])
    work.wait()
    return codec.decode(whole, sum_n.numel()).flatten()[:length]
