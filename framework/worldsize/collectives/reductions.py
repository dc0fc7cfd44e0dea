"""Reductions that send fewer bytes over slow links: hierarchical, compressed and sparse.

Hierarchical reductions sum inside nodes first, then inside racks. Compressed formats for float32 have 16 bits, or 8
bits with a scale per block. In sparse reductions each rank sends only some of its elements: the largest (top-k), or
random indices shared by all ranks (random-k).

Elements that a rank does not send are added to its next values (error feedback, also called memory). Both methods omit
at most a fraction 1 - k/n of the squared norm, top-k always and random-k on average, as required for convergence
(Stich et al. 2018, arXiv 1809.07599, definition 2.1 and lemma A.1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from worldsize.collectives.group import start_collective
from worldsize.collectives.staged import Phases, Summation
from worldsize.devices import move_to_device

Sum = Callable[[Tensor, ProcessGroup], Phases]  # all-reduces a flat tensor (n,); may reuse its memory


def all_reduced(flat_n: Tensor, group: ProcessGroup) -> Phases:
    """Sum ``flat_n``, of shape (n,), in place with torch's all-reduce."""
    work = start_collective(dist.all_reduce, flat_n, group=group)
    yield
    work.wait()
    return flat_n


def hierarchical(flat_n: Tensor, inner: Sequence[ProcessGroup], across: ProcessGroup, total: Sum) -> Phases:
    """Sum ``flat_n``, of shape (n,), over all ranks, tier by tier, starting inside each node.

    A reduce-scatter over the first ``inner`` group leaves each rank with a shard. The shard is reduced in the same way
    over the other inner groups, and finally with ``total`` over ``across``; then an all-gather over the first group
    distributes the sums. If the inner tiers span G ranks, each rank sends 1/G of the bytes over the outermost links.
    """
    if not inner:
        return (yield from total(flat_n, across))
    padding = -flat_n.numel() % dist.get_world_size(inner[0])
    padded = F.pad(flat_n, (0, padding)) if padding else flat_n
    part = yield from _reduce_scatter(padded, inner[0])
    part = yield from hierarchical(part, inner[1:], across, total)
    work = start_collective(dist.all_gather_into_tensor, padded, part, group=inner[0])
    yield
    work.wait()
    return padded[: flat_n.numel()] if padding else flat_n


def _reduce_scatter(flat_n: Tensor, group: ProcessGroup) -> Phases:
    """Return this rank's shard of the sum.

    On the CPU this is an all-to-all, since gloo's reduce-scatter is an all-reduce that discards most of its result.
    """
    size = dist.get_world_size(group)
    if flat_n.device.type == "cpu":
        theirs_n = torch.empty_like(flat_n)
        work = start_collective(dist.all_to_all_single, theirs_n, flat_n, group=group)
        yield
        work.wait()
        return theirs_n.view(size, -1).sum(0)
    part = flat_n.new_empty(flat_n.numel() // size)
    work = start_collective(dist.reduce_scatter_tensor, part, flat_n, group=group)
    yield
    work.wait()
    return part


def reduce_compressed(flat_n: Tensor, group: ProcessGroup, codec: Codec, error_n: Tensor | None = None) -> Phases:
    """Sum in float32 with encoded messages: an all-to-all of shards, an all-gather of sums.

    Work that does not depend on a collective overlaps with it, and is done in place, because writing to newly allocated
    memory takes a CPU several times as long.

    Args:
        flat_n: this rank's values, float32 (n,).
        group: the participating ranks.
        codec: the wire format of both messages.
        error_n: the compression error of this rank's earlier messages, float32 (n,). It is added to the values, and
            replaced with the error of the new messages (error feedback, Seide et al. 2014, Interspeech; Karimireddy et
            al. 2019, arXiv 1901.09847). The error of the second message, a sum, is stored by the rank that sends it.
    """
    size = dist.get_world_size(group)
    mine_n = flat_n if error_n is None else error_n.add_(flat_n)
    parts_pn = _split_parts(mine_n, size)
    count = parts_pn.shape[1]
    wire = codec.encode(parts_pn)
    theirs = torch.empty_like(wire)
    work = start_collective(dist.all_to_all_single, theirs, wire, group=group)
    yield
    if error_n is not None:
        for columns, sent_pk in codec.decode_pieces(wire, count):
            parts_pn[:, columns].sub_(sent_pk)
    work.wait()
    sum_n = flat_n.new_empty(count)
    for columns, summands_pk in codec.decode_pieces(theirs, count):
        torch.sum(summands_pk, 0, out=sum_n[columns])
    wire = codec.encode(sum_n[None])
    total_pb = wire.new_empty(size, wire.shape[1])
    work = start_collective(dist.all_gather_into_tensor, total_pb, wire, group=group)
    yield
    if error_n is not None:
        parts_pn[dist.get_rank(group)] += sum_n - codec.decode(wire, count)[0]
        _put_back(parts_pn, error_n)
    work.wait()
    sums_pn = _split_parts(flat_n, size)
    for columns, sums_pk in codec.decode_pieces(total_pb, count):
        sums_pn[:, columns] = sums_pk
    return _put_back(sums_pn, flat_n)


@final
class Encoded(Summation):
    """All-reduce of tensors encoded by a codec, see :func:`reduce_compressed`."""

    def __init__(self, codec: Codec) -> None:
        self._codec, self.keeps_errors = codec, codec.lossy

    def all_reduce(self, flat_n: Tensor, group: ProcessGroup, *, error_n: Tensor | None, seed: int) -> Phases:
        return reduce_compressed(flat_n, group, self._codec, error_n)


def _split_parts(flat_n: Tensor, count: int) -> Tensor:
    """Return ``flat_n`` as (count, n / count), a view if possible, otherwise a padded copy."""
    padding = -flat_n.numel() % count
    return (F.pad(flat_n, (0, padding)) if padding else flat_n).view(count, -1)


def _put_back(parts_pn: Tensor, flat_n: Tensor) -> Tensor:
    """Copy the parts back into ``flat_n``, unless they are views of it, and return ``flat_n``."""
    if parts_pn.data_ptr() != flat_n.data_ptr():
        flat_n.copy_(parts_pn.flatten()[: flat_n.numel()])
    return flat_n


_BLOCK = 1024  # elements that share a scale
_CACHED = 1 << 18  # elements that a CPU converts at a time, so that they stay in its cache


class Codec(ABC):
    """Encodes rows of float32 as rows of bytes, and decodes them."""

    lossy = False  # whether error feedback is worthwhile

    @abstractmethod
    def encode(self, values_pn: Tensor) -> Tensor:
        """Encode float32 (p, n) as contiguous uint8 (p, bytes)."""

    @abstractmethod
    def _decode_columns(self, wire_pb: Tensor, columns: slice, length: int) -> Tensor:
        """Decode ``columns`` (from a block's start) of ``length``-element rows to float32 (p, k)."""

    def decode_pieces(self, wire_pb: Tensor, length: int) -> Iterator[tuple[slice, Tensor]]:
        """Decode uint8 (p, bytes) in pieces; yield the columns and float32 values (p, k) of each."""
        for columns in _split_columns(wire_pb, length):
            yield columns, self._decode_columns(wire_pb, columns, length)

    def decode(self, wire_pb: Tensor, length: int) -> Tensor:
        """Decode uint8 (p, bytes) to float32 (p, length)."""
        values_pn = torch.empty(len(wire_pb), length, device=wire_pb.device)
        for columns, piece_pk in self.decode_pieces(wire_pb, length):
            values_pn[:, columns] = piece_pk
        return values_pn


def _split_columns(rows: Tensor, length: int) -> Iterator[slice]:
    """Yield column slices of whole blocks, small enough on a CPU for all rows to fit its cache."""
    each = max(1, _CACHED // _BLOCK // len(rows)) * _BLOCK if rows.device.type == "cpu" else length
    return (slice(first, min(first + each, length)) for first in range(0, length, each))


@final
class Half(Codec):
    """16-bit floats: bfloat16 has the range of float32, float16 three more bits of precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, values_pn: Tensor) -> Tensor:
        return values_pn.to(self._dtype).view(torch.uint8)

    def _decode_columns(self, wire_pb: Tensor, columns: slice, length: int) -> Tensor:
        return wire_pb.view(self._dtype)[:, columns].float()


@final
class Int8(Codec):
    """8-bit levels, scaled by the maximum of each 1,024 elements (Dettmers, arXiv 1511.04561)."""

    lossy = True

    def encode(self, values_pn: Tensor) -> Tensor:
        """Encode float32 (p, n) as uint8 (p, bytes): scales, then int8 levels of whole blocks."""
        rows, length = values_pn.shape
        wire_pb = torch.empty(rows, -(-length // _BLOCK) * (4 + _BLOCK), dtype=torch.uint8, device=values_pn.device)
        scales_pk, levels_pkb = _split_wire(wire_pb, length)
        for columns in _split_columns(values_pn, length):
            blocks = slice(columns.start // _BLOCK, -(-columns.stop // _BLOCK))
            _quantize(values_pn[:, columns], scales_pk[:, blocks], levels_pkb[:, blocks])
        return wire_pb

    def _decode_columns(self, wire_pb: Tensor, columns: slice, length: int) -> Tensor:
        scales_pk, levels_pkb = _split_wire(wire_pb, length)
        blocks = slice(columns.start // _BLOCK, -(-columns.stop // _BLOCK))
        values_pkb = levels_pkb[:, blocks].float().mul_(scales_pk[:, blocks, None])
        return values_pkb.flatten(1)[:, : columns.stop - columns.start]


def _split_wire(wire_pb: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return views of the scales, float32 (p, blocks), and levels, int8 (p, blocks, elements)."""
    blocks = -(-length // _BLOCK)
    return (
        wire_pb[:, : 4 * blocks].view(torch.float32),
        wire_pb[:, 4 * blocks :].view(torch.int8).view(len(wire_pb), blocks, _BLOCK),
    )


def _quantize(values_pn: Tensor, scales_pk: Tensor, levels_pkb: Tensor) -> None:
    """Quantize ``values_pn``, padded to full blocks, into ``scales_pk`` and ``levels_pkb``."""
    padding = -values_pn.shape[1] % _BLOCK
    blocks_pkb = (F.pad(values_pn, (0, padding)) if padding else values_pn).view(len(values_pn), -1, _BLOCK)
    torch.div(blocks_pkb.abs().amax(2), 127, out=scales_pk)
    scales_pk1 = scales_pk[:, :, None].clamp_min(torch.finfo(torch.float32).tiny)
    levels_pkb.copy_(blocks_pkb.div(scales_pk1).round_())


CODECS: dict[str, Codec] = {"bf16": Half(torch.bfloat16), "fp16": Half(torch.float16), "int8": Int8()}


def count_kept(length: int, density: float) -> int:
    """Return the number of elements to send: ``density`` times ``length``, at least one."""
    return max(1, int(length * density))


@final
class TopKSum(Summation):
    """Sum of each rank's k largest elements (Aji and Heafield 2017; Lin et al. 2018, alg. 1).

    An all-gather collects k float32 and k int32 from each rank, and every rank sums them in rank order. Non-finite
    values are among the largest, so all ranks receive them; they are not stored in the error.
    """

    keeps_errors = True

    def __init__(self, density: float) -> None:
        self._density = density

    def all_reduce(self, flat_n: Tensor, group: ProcessGroup, *, error_n: Tensor | None, seed: int) -> Phases:
        assert error_n is not None
        size, count = dist.get_world_size(group), count_kept(flat_n.numel(), self._density)
        error_n.add_(flat_n)
        places_k = error_n.abs().topk(count, sorted=False).indices
        message = torch.stack([places_k.int(), error_n[places_k].view(torch.int32)])
        messages = message.new_empty(size * message.numel())
        work = start_collective(dist.all_gather_into_tensor, messages, message.view(-1), group=group)
        yield
        _clear_sent(error_n, places_k)
        work.wait()
        total_n = flat_n.zero_()
        for indices_k, values_k in messages.view(size, 2, count):
            total_n.index_add_(0, indices_k, values_k.view(torch.float32).to(total_n.dtype))
        return total_n


@final
class RandomK(Summation):
    """Sum of the elements at k random indices, derived by all ranks from the same seed.

    This is an all-reduce of k values. One index is sampled from each run of n/k neighbors, so that each element is
    sent with probability k/n, and sampling needs k random numbers instead of n. Without ``keeps_errors``, sent values
    are divided by their probability to make the sum unbiased (Wangni et al. 2018, arXiv 1710.09854, section 2).
    """

    def __init__(self, density: float, *, keeps_errors: bool) -> None:
        self._density, self.keeps_errors = density, keeps_errors

    def all_reduce(self, flat_n: Tensor, group: ProcessGroup, *, error_n: Tensor | None, seed: int) -> Phases:
        places_k, widths_k = (
            move_to_device(each, flat_n.device)
            for each in draw_indices(flat_n.numel(), count_kept(flat_n.numel(), self._density), seed)
        )
        broken = flat_n.sum().mul_(0)  # NaN if any element is not finite, since the sampled ones may all be finite
        values_k = flat_n[places_k] * widths_k if error_n is None else error_n.add_(flat_n)[places_k]
        work = start_collective(dist.all_reduce, values_k.add_(broken), group=group)
        yield
        if error_n is not None:
            _clear_sent(error_n, places_k)
        work.wait()
        flat_n.zero_()[places_k] = values_k.to(flat_n.dtype)
        return flat_n


def draw_indices(length: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Split ``length`` indices into ``count`` runs of neighbors, and sample one index from each.

    The generator is always on the CPU, so that ranks with different devices sample the same indices.

    Returns:
        The indices, int64 (count,), ascending; and the lengths of the runs, int64 (count,): each index of a run is
        sampled with probability 1 / length.
    """
    edges = torch.arange(count + 1) * length // count
    widths_k = edges.diff()
    random_k = torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return edges[:-1] + (random_k * widths_k).long().minimum(widths_k - 1), widths_k


def _clear_sent(error_n: Tensor, places_k: Tensor) -> None:
    """Remove sent and non-finite values from the error; the latter would stay forever."""
    error_n[places_k] = 0
    error_n.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
