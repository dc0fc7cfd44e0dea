"""Whether to stop: one rank's wish becomes all ranks' decision at the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from worldsize.collectives.exact import gather
from worldsize.core import StepDone, World

_INTERVAL = 0.25  # seconds between two exchanges, about


@final
class Agreement:
    """An exchange of one number, about four times a second, that crosses the network while a step is computed.

    How many steps that is follows from figures that all ranks have, so that all exchange at the same steps.
    """

    def __init__(self, world: World, wanted: Callable[[], bool]) -> None:
        self._world, self._wanted = world, wanted
        self._stride = 1
        self._flags: Callable[[], Tensor] | None = None

    def tell(self, done: StepDone) -> None:
        steps_per_second = done.samples_per_second * done.step / done.samples
        self._stride = max(1, min(10_000, int(_INTERVAL * steps_per_second)))

    def reached(self, step: int) -> bool:
        """After ``step``: whether the last exchange found a rank that wants to stop; may begin the next one."""
        stop = self._flags is not None and bool(self._flags().any())
        self._flags = None
        if step % self._stride == 0:
            self._flags = gather(torch.tensor([float(self._wanted())], device=self._world.device), self._world)
        return stop
