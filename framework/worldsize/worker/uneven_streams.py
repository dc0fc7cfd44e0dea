"""Warns once if the shards of a divided training stream are so uneven that some are read again before others end."""

from __future__ import annotations

import logging
from typing import final

import torch

from worldsize.collectives.exact import start_all_gather
from worldsize.core import StepDone, World
from worldsize.data.streams import TrainingStream

_logger = logging.getLogger(__name__)


@final
class UnevenStreams:
    """Compares the passes that the readers of all ranks have begun, at logged steps and until they differ once."""

    def __init__(self, stream: TrainingStream, world: World) -> None:
        self._stream, self._world, self._ended = stream, world, False

    def examine(self, done: StepDone) -> None:
        """Compare the passes together with all other ranks; rank 0 warns."""
        passes = None if self._ended else self._stream.passes(done.step)
        if passes is None:  # of every rank alike
            return
        fewest, most = start_all_gather(torch.tensor(passes, device=self._world.device), self._world)().unbind(1)
        first, last = int(most.max()), int(fewest.min())
        self._ended = first > last
        if self._ended and self._world.rank == 0:
            _logger.warning(
                "the shards of the training stream are uneven: by step %d one logical rank reads its shards for the "
                "%d. time, and another for the %d. time, so that the samples of shorter shards are seen more often. "
                "Make shards of equally many samples, or return data with an index.",
                done.step,
                first + 1,
                last + 1,
            )
