"""Agreement of all ranks to stop or save after the same step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, final

import torch

from worldsize.collectives.exact import start_all_reduce
from worldsize.core import StepDone, World

_INTERVAL = 0.5  # approximate seconds between two exchanges
_LEAST = 20  # minimum number of exchanges per run, so that short runs notice a request to stop


class Wishes(NamedTuple):
    """A rank's requests: to end the run, or to save because a save is overdue."""

    stop: bool = False
    save: bool = False


@final
class Agreement:
    """All-reduces the ranks' requests to stop or save, in the background of a step.

    The ranks exchange requests about twice a second, and at least 20 times in a run of ``steps``. They compute the
    number of steps between two exchanges from shared values, so that they exchange at the same steps.
    """

    def __init__(self, world: World, wishes: Callable[[], Wishes], *, steps: int) -> None:
        self._world, self._own = world, wishes
        self._longest = max(1, min(10_000, steps // _LEAST))
        self._stride = 1
        self._wishes: Callable[[], torch.Tensor] | None = None

    def update_interval(self, done: StepDone) -> None:
        """Update the interval from the duration of a logged step."""
        steps_per_second = done.samples_per_second * done.step / done.samples
        self._stride = max(1, min(self._longest, int(_INTERVAL * steps_per_second)))

    def exchange_wishes(self, step: int) -> Wishes:
        """Return the last exchange's result, and start the next exchange after ``step`` if due.

        The run stops if any rank requests it; it saves once all ranks request it.
        """
        stop, save, ranks = self._wishes().tolist() if self._wishes is not None else (0.0, 0.0, 1.0)
        self._wishes = None
        if step % self._stride == 0:
            self._wishes = start_all_reduce(torch.tensor([*map(float, self._own()), 1.0]), self._world)
        return Wishes(stop > 0, save == ranks)
