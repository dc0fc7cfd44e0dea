"""Perturbs the heap: a result must depend neither on addresses of memory nor on its earlier contents."""

from __future__ import annotations

import math
import random
from typing import final

import torch
from torch import Tensor

_BLOCKS = 64  # blocks of each kind in a perturbation
_LARGEST = 4096  # numbers in a block, few enough for the allocator to reuse it rather than return it to the system


@final
class Heap:
    """Allocates and frees blocks of odd sizes in this process, so that later allocations get other addresses."""

    def __init__(self) -> None:
        self._random = random.Random()  # the run's own generators are not advanced
        self._kept: list[Tensor | bytearray] = []

    def perturb(self) -> None:
        """Allocate blocks of NaN, and free half of all blocks; the other half keep their addresses occupied."""
        blocks = [block for _ in range(_BLOCKS) for block in (self._tensor(), bytearray(self._size()))]
        mixed: list[Tensor | bytearray] = [*self._kept, *blocks]
        self._random.shuffle(mixed)
        self._kept = mixed[: len(mixed) // 2]

    def _tensor(self) -> Tensor:
        return torch.full((self._size(),), math.nan)

    def _size(self) -> int:
        return 2 * self._random.randrange(_LARGEST // 2) + 1
