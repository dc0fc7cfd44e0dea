"""The place of a step in its epoch, computed from its number alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class RunValues:
    """The values of the run that a LightningModule may ask for, or that its DataLoaders have too.

    Args:
        batch_size: samples of a step over all logical ranks.
        seed: seeds the making of the data module, so that all processes split the data in the same way.
    """

    steps: int
    batch_size: int
    evaluate_batch_size: int
    seed: int


@final
@dataclass(frozen=True)
class Positions:
    """Epochs of ``samples``, of which each step draws ``batch_size``; a batch may straddle two epochs.

    Without ``samples`` the data are a stream, all of which is one epoch. Steps are counted from 1, epochs and batches
    from 0, as Lightning counts them.
    """

    samples: int | None
    batch_size: int

    def epoch(self, step: int) -> int:
        """Return the epoch in which ``step`` begins."""
        return self.finished_epochs(step - 1)

    def finished_epochs(self, step: int) -> int:
        """Count the epochs whose last sample has been drawn after ``step``."""
        return 0 if self.samples is None else step * self.batch_size // self.samples

    def batch_index(self, step: int) -> int:
        """Return the number of the step within its epoch."""
        if self.samples is None:
            return step - 1
        return step - 1 - -(-self.epoch(step) * self.samples // self.batch_size)

    def ends_epoch(self, step: int) -> bool:
        """Return whether ``step`` draws the last sample of an epoch."""
        return self.finished_epochs(step) > self.finished_epochs(step - 1)

    @property
    def steps_of_epoch(self) -> int | None:
        """Count the steps of an epoch, rounded up; None: it has no end."""
        return None if self.samples is None else -(-self.samples // self.batch_size)

    def epochs(self, steps: int) -> int | None:
        """Count the epochs of a run of ``steps``, rounded up; None: they have no end."""
        return None if self.samples is None else -(-steps * self.batch_size // self.samples)
