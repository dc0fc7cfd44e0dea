"""Warns once if short shards of a training stream restart before longer ones end."""

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
    """Compares how often each rank has read its shards, until the numbers differ once."""

    def __init__(self, stream: TrainingStream, world: World) -> None:
        self._stream, self._world, self._ended = stream, world, False

    def compare_passes(self, done: StepDone) -> None:
        """Compare the numbers of passes on all ranks, and warn on rank 0; every rank must call it."""
        passes = None if self._ended else self._stream.count_passes(done.step)
        if passes is None:  # on all ranks or none
            return
        fewest, most = start_all_gather(torch.tensor(passes, device=self._world.device), self._world)().unbind(1)
        first, last = int(most.max()), int(fewest.min())
        self._ended = first > last
        if self._ended and self._world.rank == 0:
            _logger.warning(
                "the shards of the training stream are uneven: at step %d, one logical rank is in pass %d over its "
                "shards and another in pass %d, so samples of shorter shards are seen more often. "
                "Use shards with equal numbers of samples, or return a map-style dataset.",
                done.step,
                first + 1,
                last + 1,
            )
