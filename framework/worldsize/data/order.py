"""Decides which samples a step sees, by the seed, the step and the logical rank alone.

So the position in the data is one number, the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from worldsize.core import Dealing
from worldsize.data.permutation import permuted
from worldsize.reproducibility.seeds import stream


@final
@dataclass(frozen=True)
class Order:
    """The order of training samples: one permutation an epoch, cut into steps, then into logical ranks.

    Batches may straddle epochs, so every sample is drawn exactly once an epoch whatever the batch size.
    """

    seed: int
    batch_size: int  # samples of a step, over all logical ranks
    logical_ranks: int
    mine: tuple[int, ...]  # the logical ranks that this process carries
    balanced: bool = False  # samples change places with those of neighbouring steps: data/balanced.py

    @property
    def micro_batch_size(self) -> int:
        """Samples of one logical rank in a step."""
        return self.batch_size // self.logical_ranks

    def positions(self, step: int, logical_rank: int) -> range:
        """Return the places that ``logical_rank`` takes in the endless stream of samples in ``step`` (from 1)."""
        first = (step - 1) * self.batch_size + logical_rank * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def indices(self, step: int, logical_rank: int, length: int) -> Tensor:
        """Return dataset indices, int64 [micro_batch_size], for a data set of ``length`` samples."""
        positions = self.positions(step, logical_rank)
        parts = []
        while positions:
            epoch, offset = divmod(positions.start, length)
            taken = min(len(positions), length - offset)
            parts.append(permuted(stream(self.seed, "order", epoch), length, range(offset, offset + taken)))
            positions = positions[taken:]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def step_seed(self, step: int, logical_rank: int) -> int:
        """Return the 63-bit seed of what one logical rank draws while it computes ``step``."""
        return stream(self.seed, "step", step, logical_rank)


def logical_ranks_of(rank: int, size: int, total: int, dealing: Dealing = "cyclic") -> tuple[int, ...]:
    """Return the logical ranks of process ``rank`` of ``size``, of ``total`` that are dealt."""
    if dealing == "block":
        return tuple(range(rank * total // size, (rank + 1) * total // size))
    return tuple(range(rank, total, size))


def steps_of(epochs: float, length: int, batch_size: int) -> int:
    """Return the steps that draw every sample ``epochs`` times, rounded up."""
    return math.ceil(epochs * length / batch_size)
