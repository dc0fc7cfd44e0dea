"""Large tensors that a constructor computes weights from, such as arrays that it has read from files."""

from __future__ import annotations

import hashlib
from typing import final

import torch
from torch import Tensor

from worldsize.strategies.deferred.fakes import CannotDeferError


@final
class BorrowedTensors:
    """Tensors that are read again when weights are made from them, and must not change until then."""

    def __init__(self) -> None:
        self._tensors: list[tuple[Tensor, int, bytes | None]] = []  # with their versions and digests

    def add(self, tensor: Tensor) -> None:
        """Keep a reference to ``tensor``, of any shape, whose values must not change."""
        self._tensors.append((tensor, tensor._version, _digest(tensor)))

    def tensors(self) -> list[Tensor]:
        """Return the kept tensors, in their shapes."""
        return [tensor for tensor, *_ in self._tensors]

    def check(self) -> None:
        """Raise CannotDeferError if a tensor has been changed since it was added."""
        for tensor, version, digest in self._tensors:
            if tensor._version != version or _digest(tensor) != digest:
                raise CannotDeferError(
                    "its constructor changes a tensor from which it made weights",
                    "Let it read each weight into memory of its own.",
                )


def _digest(tensor: Tensor) -> bytes | None:
    """Return a digest of ``tensor`` if code other than torch, such as NumPy, may write to its memory.

    None: only torch writes to it, and counts versions.
    """
    if tensor.layout is not torch.strided or tensor.untyped_storage().resizable():
        return None
    numbers = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(numbers.data, digest_size=16).digest()
