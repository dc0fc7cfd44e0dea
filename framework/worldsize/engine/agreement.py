"""Turns one rank's wish to stop into a decision that all ranks take at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from worldsize.collectives.exact import start_all_reduce
from worldsize.core import StepDone, World

_INTERVAL = 0.5  # seconds between two exchanges, about
_LEAST = 20  # exchanges in a run, however short: a run that is asked to stop must not end as if nobody had asked


@final
class Agreement:
    """Sums the ranks' wishes while a step is computed.

    It does so about twice a second, and at least 20 times in a run of ``steps``. How many steps lie between two sums
    follows from figures that all ranks have, so that all exchange at the same steps.
    """

    def __init__(self, world: World, wanted: Callable[[], bool], *, steps: int) -> None:
        self._world, self._wanted = world, wanted
        self._longest = max(1, min(10_000, steps // _LEAST))
        self._stride = 1
        self._wishes: Callable[[], Tensor] | None = None

    def tell(self, done: StepDone) -> None:
        """Learn from a logged step how fast steps are."""
        steps_per_second = done.samples_per_second * done.step / done.samples
        self._stride = max(1, min(self._longest, int(_INTERVAL * steps_per_second)))

    def reached(self, step: int) -> bool:
        """Tell after ``step`` whether the last sum had a rank that wants to stop, and begin the next if it is due."""
        stop = self._wishes is not None and float(self._wishes()) > 0
        self._wishes = None
        if step % self._stride == 0:
            self._wishes = start_all_reduce(torch.tensor(float(self._wanted())), self._world)
        return stop
