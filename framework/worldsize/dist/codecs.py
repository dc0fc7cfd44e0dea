"""Compressed wire formats for float32: 16-bit, or 8-bit with a scale for each block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK = 1024  # numbers that share a scale
_CACHED = 1 << 18  # numbers that a CPU converts at a time, so that they stay in its cache


class Codec(ABC):
    """Encodes rows of float32 as rows of bytes, and decodes them."""

    lossy = False  # whether error feedback pays: adding its error to the next message

    @abstractmethod
    def encode(self, values_pn: Tensor) -> Tensor:
        """Encode float32 (p, n) as contiguous uint8 (p, bytes), with the same number of bytes for each row."""

    @abstractmethod
    def _decoded(self, wire_pb: Tensor, columns: slice, length: int) -> Tensor:
        """Decode ``columns`` of rows of ``length`` numbers as float32 (p, k); the first column begins a block."""

    def pieces(self, wire_pb: Tensor, length: int) -> Iterator[tuple[slice, Tensor]]:
        """Decode uint8 (p, bytes) piece by piece: yield the columns of each piece and its float32 (p, k)."""
        for columns in _spans(wire_pb, length):
            yield columns, self._decoded(wire_pb, columns, length)

    def decode(self, wire_pb: Tensor, length: int) -> Tensor:
        """Decode uint8 (p, bytes) to float32 (p, length)."""
        values_pn = torch.empty(len(wire_pb), length, device=wire_pb.device)
        for columns, piece_pk in self.pieces(wire_pb, length):
            values_pn[:, columns] = piece_pk
        return values_pn


def _spans(rows: Tensor, length: int) -> Iterator[slice]:
    """Yield slices of columns that cover whole blocks; on the CPU small enough that all rows stay in its cache."""
    each = max(1, _CACHED // _BLOCK // len(rows)) * _BLOCK if rows.device.type == "cpu" else length
    return (slice(first, min(first + each, length)) for first in range(0, length, each))


@final
class Half(Codec):
    """16-bit floats: bfloat16 keeps the range of float32, float16 has three more bits of precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, values_pn: Tensor) -> Tensor:
        return values_pn.to(self._dtype).view(torch.uint8)

    def _decoded(self, wire_pb: Tensor, columns: slice, length: int) -> Tensor:
        return wire_pb.view(self._dtype)[:, columns].float()


@final
class Int8(Codec):
    """The nearest of 255 levels between ±max of each block of 1,024 numbers (Dettmers 2016, arXiv 1511.04561)."""

    lossy = True

    def encode(self, values_pn: Tensor) -> Tensor:
        """Encode float32 (p, n) as uint8 (p, bytes): the scales, then the int8 levels, padded to whole blocks."""
        rows, length = values_pn.shape
        wire_pb = torch.empty(rows, -(-length // _BLOCK) * (4 + _BLOCK), dtype=torch.uint8, device=values_pn.device)
        scales_pk, levels_pkb = _parts(wire_pb, length)
        for columns in _spans(values_pn, length):
            blocks = slice(columns.start // _BLOCK, -(-columns.stop // _BLOCK))
            _quantize(values_pn[:, columns], scales_pk[:, blocks], levels_pkb[:, blocks])
        return wire_pb

    def _decoded(self, wire_pb: Tensor, columns: slice, length: int) -> Tensor:
        scales_pk, levels_pkb = _parts(wire_pb, length)
        blocks = slice(columns.start // _BLOCK, -(-columns.stop // _BLOCK))
        values_pkb = levels_pkb[:, blocks].float().mul_(scales_pk[:, blocks, None])
        return values_pkb.flatten(1)[:, : columns.stop - columns.start]


def _parts(wire_pb: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return views of the scales, float32 (p, blocks), and of the levels, int8 (p, blocks, numbers)."""
    blocks = -(-length // _BLOCK)
    return (
        wire_pb[:, : 4 * blocks].view(torch.float32),
        wire_pb[:, 4 * blocks :].view(torch.int8).view(len(wire_pb), blocks, _BLOCK),
    )


def _quantize(values_pn: Tensor, scales_pk: Tensor, levels_pkb: Tensor) -> None:
    """Quantize ``values_pn`` into ``scales_pk`` and ``levels_pkb``, in place; all blocks are full."""
    padding = -values_pn.shape[1] % _BLOCK
    blocks_pkb = (F.pad(values_pn, (0, padding)) if padding else values_pn).view(len(values_pn), -1, _BLOCK)
    torch.div(blocks_pkb.abs().amax(2), 127, out=scales_pk)
    scales_pk1 = scales_pk[:, :, None].clamp_min(torch.finfo(torch.float32).tiny)
    levels_pkb.copy_(blocks_pkb.div(scales_pk1).round_())


CODECS: dict[str, Codec] = {"bf16": Half(torch.bfloat16), "fp16": Half(torch.float16), "int8": Int8()}
