"""Position of a step within its epoch, computed only from its number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class RunValues:
    """Run settings used by a LightningModule or its DataLoaders.

    Args:
        batch_size: samples per step over all logical ranks.
        seed: seed for creating the data module, so that all processes split the data identically.
    """

    steps: int
    batch_size: int
    evaluate_batch_size: int
    seed: int


@final
@dataclass(frozen=True)
class Positions:
    """Epochs of ``samples`` in steps of ``batch_size``; a batch may straddle two epochs.

    If ``samples`` is None, the data is a stream, all of which is one epoch. Steps count from 1, epochs and batches from
    0, as in Lightning.
    """

    samples: int | None
    batch_size: int

    def find_epoch(self, step: int) -> int:
        """Return the epoch in which ``step`` starts."""
        return self.count_finished_epochs(step - 1)

    def count_finished_epochs(self, step: int) -> int:
        """Return the number of epochs completed after ``step``."""
        return 0 if self.samples is None else step * self.batch_size // self.samples

    def batch_index(self, step: int) -> int:
        """Return the index of the step within its epoch."""
        if self.samples is None:
            return step - 1
        return step - 1 - -(-self.find_epoch(step) * self.samples // self.batch_size)

    def ends_epoch(self, step: int) -> bool:
        """Return whether ``step`` includes the last sample of an epoch."""
        return self.count_finished_epochs(step) > self.count_finished_epochs(step - 1)

    @property
    def steps_of_epoch(self) -> int | None:
        """Steps per epoch, rounded up. None if the data is a stream."""
        return None if self.samples is None else -(-self.samples // self.batch_size)

    def count_epochs(self, steps: int) -> int | None:
        """Return the epochs in ``steps``, rounded up. None if the data is a stream."""
        return None if self.samples is None else -(-steps * self.batch_size // self.samples)
