"""Disorders the heap: a result must not depend on where its numbers lie, nor on what lay there before."""

from __future__ import annotations

import math
import random
from typing import final

import torch
from torch import Tensor

_BLOCKS = 64  # of each kind in a perturbation
_LARGEST = 4096  # numbers of a block: small enough for the allocator to hand it out again, not to give it back


@final
class Heap:
    """Allocates and frees blocks of odd sizes in this process, so that what is allocated next lies elsewhere."""

    def __init__(self) -> None:
        self._random = random.Random()  # the run's own generators stay where they are
        self._kept: list[Tensor | bytearray] = []

    def perturb(self) -> None:
        """Allocate blocks of NaN, and free half of these and of those kept before; the others stay in the way."""
        blocks = [block for _ in range(_BLOCKS) for block in (self._tensor(), bytearray(self._size()))]
        mixed: list[Tensor | bytearray] = [*self._kept, *blocks]
        self._random.shuffle(mixed)
        self._kept = mixed[: len(mixed) // 2]

    def _tensor(self) -> Tensor:
        return torch.full((self._size(),), math.nan)

    def _size(self) -> int:
        return 2 * self._random.randrange(_LARGEST // 2) + 1
