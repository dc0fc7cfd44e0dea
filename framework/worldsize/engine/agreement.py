"""Whether to stop: one rank's wish becomes all ranks' decision at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from worldsize.collectives.exact import share
from worldsize.core import StepDone, World

_INTERVAL = 0.5  # seconds between two exchanges, about
_LEAST = 20  # exchanges in a run, however short it is: one that is asked to stop must not end as if it had not been


@final
class Agreement:
    """A sum of one number that crosses the network while a step is computed: about twice a second, and at least 20
    times in a run of ``steps``.

    How many steps that is follows from figures that all ranks have, so that all exchange at the same steps.
    """

    def __init__(self, world: World, wanted: Callable[[], bool], *, steps: int) -> None:
        self._world, self._wanted = world, wanted
        self._longest = max(1, min(10_000, steps // _LEAST))
        self._stride = 1
        self._wishes: Callable[[], Tensor] | None = None

    def tell(self, done: StepDone) -> None:
        steps_per_second = done.samples_per_second * done.step / done.samples
        self._stride = max(1, min(self._longest, int(_INTERVAL * steps_per_second)))

    def reached(self, step: int) -> bool:
        """After ``step``: whether the last sum has found a rank that wants to stop; may begin the next one."""
        stop = self._wishes is not None and float(self._wishes()) > 0
        self._wishes = None
        if step % self._stride == 0:
            self._wishes = share(torch.tensor(float(self._wanted())), self._world)
        return stop
