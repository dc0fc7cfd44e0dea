"""Turns one rank's request to stop or to save into a decision that all ranks take at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from worldsize.collectives.exact import start_all_reduce
from worldsize.core import StepDone, World

_INTERVAL = 0.5  # approximate seconds between two exchanges
_LEAST = 20  # exchanges in a run, so that a short run does not end before it notices a request to stop


class Wishes(NamedTuple):
    """The wishes of a rank: to end the run, or to save, since the last save was long ago."""

    stop: bool = False
    save: bool = False


@final
class Agreement:
    """Sums the ranks' requests to stop, and those to save, while a step is computed.

    It does so about twice a second, and at least 20 times in a run of ``steps``. The number of steps between two sums
    is derived from values that all ranks share, so that all exchange at the same steps.
    """

    def __init__(self, world: World, wishes: Callable[[], Wishes], *, steps: int) -> None:
        self._world, self._own = world, wishes
        self._longest = max(1, min(10_000, steps // _LEAST))
        self._stride = 1
        self._wishes: Callable[[], Tensor] | None = None

    def tell(self, done: StepDone) -> None:
        """Update the interval with the duration of a logged step."""
        steps_per_second = done.samples_per_second * done.step / done.samples
        self._stride = max(1, min(self._longest, int(_INTERVAL * steps_per_second)))

    def reached(self, step: int) -> Wishes:
        """Return, after ``step``, what the ranks agreed on at the last sum; start the next sum if it is due.

        One rank is enough for the run to end; a save follows once all ask for it.
        """
        stop, save, ranks = self._wishes().tolist() if self._wishes is not None else (0.0, 0.0, 1.0)
        self._wishes = None
        if step % self._stride == 0:
            self._wishes = start_all_reduce(torch.tensor([*map(float, self._own()), 1.0]), self._world)
        return Wishes(stop > 0, save == ranks)
