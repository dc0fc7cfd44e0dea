"""Compressed wire formats of gradients, and error feedback: the compression error is added to the next gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

import numpy
import torch
from torch import Tensor

Compression = Literal["none", "bf16", "onebit", "topk"]


class GradientCodec(ABC):
    """A wire format of float32 gradients (n,). The length of a payload depends only on the number of elements."""

    dtype: torch.dtype = torch.uint8

    @abstractmethod
    def length(self, numel: int) -> int:
        """Return how many numbers of ``dtype`` a payload of ``numel`` elements has."""

    @abstractmethod
    def encode(self, gradient_n: Tensor) -> Tensor:
        """Encode float32 (n,) as a payload (length(n),); may change ``gradient_n``."""

    @abstractmethod
    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Decode a payload (length(numel),) to a float32 gradient (numel,)."""


@final
class HalfBytes(GradientCodec):
    """bfloat16: half the bytes."""

    dtype = torch.bfloat16

    def length(self, numel: int) -> int:
        return numel

    def encode(self, gradient_n: Tensor) -> Tensor:
        return gradient_n.bfloat16()

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        return payload.float()


@final
class OneBit(GradientCodec):
    """One bit per number: signs, and the means of positive and negative numbers (Seide et al. 2014, Interspeech)."""

    def length(self, numel: int) -> int:
        return 8 + -(-numel // 8)

    def encode(self, gradient_n: Tensor) -> Tensor:
        positive_n = gradient_n >= 0
        means = [float(part.mean()) if len(part) else 0.0 for part in (gradient_n[positive_n], gradient_n[~positive_n])]
        bits = torch.from_numpy(numpy.packbits(positive_n.numpy()))
        return torch.cat([torch.tensor(means).view(torch.uint8), bits])

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        positive, negative = payload[:8].clone().view(torch.float32)
        bits = torch.from_numpy(numpy.unpackbits(payload[8:].numpy(), count=numel)).bool()
        return torch.where(bits, positive, negative)


@final
class TopK(GradientCodec):
    """The fraction ``share`` of largest numbers, with indices (Aji and Heafield 2017, arXiv 1704.05021)."""

    def __init__(self, share: float) -> None:
        self._share = share

    def _count(self, numel: int) -> int:
        return max(1, int(numel * self._share))

    def length(self, numel: int) -> int:
        return 8 * self._count(numel)

    def encode(self, gradient_n: Tensor) -> Tensor:
        places_k = gradient_n.abs().topk(self._count(len(gradient_n)), sorted=False).indices
        return torch.cat([places_k.int().view(torch.uint8), gradient_n[places_k].view(torch.uint8)])

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        half = len(payload) // 2
        places_k, values_k = payload[:half].clone().view(torch.int32).long(), payload[half:].clone().view(torch.float32)
        gradient_n = torch.zeros(numel)
        gradient_n[places_k.clamp(0, numel - 1)] = values_k
        return gradient_n


@final
class Feedback:
    """Adds the compression error of earlier gradients to the next, by key (error feedback, arXiv 1901.09847)."""

    def __init__(self, codec: GradientCodec) -> None:
        self.codec = codec
        self._lost: dict[object, Tensor] = {}

    def encode(self, key: object, gradient_n: Tensor) -> Tensor:
        whole_n = gradient_n if key not in self._lost else self._lost[key].add_(gradient_n)
        payload = self.codec.encode(whole_n)
        self._lost[key] = whole_n - self.codec.decode(payload, len(whole_n))
        return payload


def codec_of(compression: Compression, *, share: float) -> GradientCodec | None:
    """Make the configured format; None: gradients are not compressed. ``share`` is the fraction kept by "topk"."""
    return {"none": None, "bf16": HalfBytes(), "onebit": OneBit(), "topk": TopK(share)}[compression]
