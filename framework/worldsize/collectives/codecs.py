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
        blocks_pkb = F.pad(values_pn, (0, -values_pn.shape[1] % _BLOCK)).view(len(values_pn), -1, _BLOCK)
        scale_pk1 = blocks_pkb.abs().amax(2, keepdim=True) / 127
        levels = (blocks_pkb / scale_pk1.clamp_min(torch.finfo(torch.float32).tiny)).round().to(torch.int8)
        levels_pn = levels.flatten(1)[:, : values_pn.shape[1]].view(torch.uint8)
        return torch.cat([scale_pk1.flatten(1).view(torch.uint8), levels_pn], dim=1)

    def decode(self, wire_pb: Tensor, length: int) -> Tensor:
        scale_pk = wire_pb[:, :-length].reshape(-1).view(torch.float32).view(len(wire_pb), -1)
        levels_pn = wire_pb[:, -length:].view(torch.int8).float()
        return levels_pn * scale_pk.repeat_interleave(_BLOCK, dim=1)[:, :length]


CODECS: dict[str, Codec] = {"bf16": Half(torch.bfloat16), "fp16": Half(torch.float16), "int8": Int8()}
