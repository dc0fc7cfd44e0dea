"""How numbers travel when not as float32: two bytes, or one with a scale for every block of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

_BLOCK = 1024  # numbers that share a scale


class Codec(ABC):
    """Rows of float32 to rows of bytes and back. ``lossy``: its error is worth feeding back."""

    lossy = False

    @abstractmethod
    def encode(self, values_pn: Tensor) -> Tensor:
        """uint8 [p, bytes], contiguous; as many bytes for every row of n."""

    @abstractmethod
    def decode(self, wire_pb: Tensor, length: int) -> Tensor:
        """float32 [p, length]."""


@final
class Half(Codec):
    """bfloat16 keeps the range of float32, float16 three more bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def encode(self, values_pn: Tensor) -> Tensor:
        return values_pn.to(self._dtype).view(torch.uint8)

    def decode(self, wire_pb: Tensor, length: int) -> Tensor:
        return wire_pb.view(self._dtype).float()


@final
class Int8(Codec):
    """The nearest of 255 levels between ±max of each block of 1,024 numbers (Dettmers 2016, arXiv 1511.04561)."""

    lossy = True

    def encode(self, values_pn: Tensor) -> Tensor:
        """Scales, then levels of whole blocks."""
        rows, padding = len(values_pn), -values_pn.shape[1] % _BLOCK
        blocks_pkb = (F.pad(values_pn, (0, padding)) if padding else values_pn).view(rows, -1, _BLOCK)
        scale_pk1 = torch.linalg.vector_norm(blocks_pkb, ord=torch.inf, dim=2, keepdim=True) / 127
        levels = blocks_pkb.div(scale_pk1.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        return torch.cat([part.view(rows, -1).view(torch.uint8) for part in (scale_pk1, levels)], dim=1)

    def decode(self, wire_pb: Tensor, length: int) -> Tensor:
        rows, blocks = len(wire_pb), -(-length // _BLOCK)
        scale_pk1 = wire_pb[:, : 4 * blocks].reshape(-1).view(torch.float32).view(rows, blocks, 1)
        levels_pkb = wire_pb[:, 4 * blocks :].view(torch.int8).view(rows, blocks, _BLOCK)
        return levels_pkb.float().mul_(scale_pk1).flatten(1)[:, :length]


CODECS: dict[str, Codec] = {"bf16": Half(torch.bfloat16), "fp16": Half(torch.float16), "int8": Int8()}
