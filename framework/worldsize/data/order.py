"""Decides which samples a step sees, by the seed, the step and the logical rank alone.

So the position in the data is one number, the step.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from worldsize.core import ConfigError, Dealing
from worldsize.data.shuffle import Shuffle
from worldsize.data.source import Transformed
from worldsize.record.seeds import stream


class OwnOrder(ABC):
    """A data set that decides the order of its samples itself, such as a mixture of several."""

    @property
    @abstractmethod
    def epoch_length(self) -> int:
        """The number of samples that are an epoch; some may be drawn more than once, or not at all."""

    @abstractmethod
    def indices_at(self, seed: int, places: range, shuffle: Shuffle) -> Tensor:
        """Return the indices, int64 [places], of the samples that stand at ``places`` of the endless stream of samples.

        Args:
            seed: that of the run.
            places: neighbours, from 0; they may be far beyond the first epoch.
            shuffle: how samples are permuted where the data set has no better way.
        """


def own_order(dataset: Any) -> OwnOrder | None:
    """Return the object that orders the samples of ``dataset``, transformed ones too; None: a permutation does."""
    while isinstance(dataset, Transformed):
        dataset = dataset.source
    return dataset if isinstance(dataset, OwnOrder) else None


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
    shuffle: Shuffle = field(default_factory=Shuffle)

    @property
    def micro_batch_size(self) -> int:
        """The number of samples of one logical rank in a step."""
        return self.batch_size // self.logical_ranks

    def positions(self, step: int, logical_rank: int) -> range:
        """Return the places that ``logical_rank`` takes in the endless stream of samples in ``step`` (from 1)."""
        first = (step - 1) * self.batch_size + logical_rank * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def indices_in(self, dataset: Any, step: int, logical_rank: int) -> Tensor:
        """Return the indices, int64 [micro_batch_size], of the samples of ``dataset`` that one logical rank takes."""
        if (own := own_order(dataset)) is not None:
            return own.indices_at(self.seed, self.positions(step, logical_rank), self.shuffle)
        return self.indices(step, logical_rank, len(dataset))

    def indices(self, step: int, logical_rank: int, length: int) -> Tensor:
        """Return which of ``length`` samples one logical rank takes: indices, int64 [micro_batch_size].

        Raises:
            ConfigError: there is no sample.
        """
        _refuse_empty(length)
        positions = self.positions(step, logical_rank)
        parts = []
        while positions:
            epoch, offset = divmod(positions.start, length)
            taken = min(len(positions), length - offset)
            parts.append(self.shuffle.span(stream(self.seed, "order", epoch), length, range(offset, offset + taken)))
            positions = positions[taken:]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def step_seed(self, step: int, logical_rank: int) -> int:
        """Return the 63-bit seed of what one logical rank draws while it computes ``step``."""
        return stream(self.seed, "step", step, logical_rank)


def epoch_length(dataset: Any) -> int:
    """Return how many samples of ``dataset`` are an epoch.

    Raises:
        ConfigError: there is none.
    """
    own = own_order(dataset)
    length = len(dataset) if own is None else own.epoch_length
    _refuse_empty(length)
    return length


def _refuse_empty(length: int) -> None:
    if length == 0:
        raise ConfigError("the data have no samples. Check the path of the data, and what is held out of them.")


def logical_ranks_of(rank: int, size: int, total: int, dealing: Dealing = "cyclic") -> tuple[int, ...]:
    """Return the logical ranks of process ``rank`` of ``size``, of ``total`` that are dealt."""
    if dealing == "block":
        return tuple(range(rank * total // size, (rank + 1) * total // size))
    return tuple(range(rank, total, size))


def steps_of(epochs: float, length: int, batch_size: int) -> int:
    """Return the steps that draw every sample ``epochs`` times, rounded up."""
    return math.ceil(epochs * length / batch_size)
