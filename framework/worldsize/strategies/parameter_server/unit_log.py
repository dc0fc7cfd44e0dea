"""Record of the units that a shard has taken while steps overlap. Pure logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final


@final
class UnitLog:
    """Remembers which gradients of each unit have come, so that each is taken once, whoever repeats it.

    A unit is named by its step and its first logical rank.

    Args:
        closed: The step after which units are taken.
        logical_ranks: The number of units of a step.
        gradients: The number of gradients of a unit: one a bucket and one a table.

    Attributes:
        closed: The last step up to which nothing is missing.
    """

    def __init__(self, closed: int, *, logical_ranks: int, gradients: int) -> None:
        self.closed = closed
        self._logical_ranks, self._gradients = logical_ranks, gradients
        self._taken: dict[tuple[int, int], set[int]] = {}  # of steps after `closed`

    def add(self, unit: tuple[int, int], index: int) -> bool:
        """Note that gradient ``index`` of a unit has come; False if it had before."""
        if unit[0] <= self.closed or index in self._taken.get(unit, ()):
            return False
        self._taken.setdefault(unit, set()).add(index)
        return True

    def is_complete(self, unit: tuple[int, int]) -> bool:
        """Whether all gradients of a unit have come."""
        return len(self._taken[unit]) == self._gradients

    def close_steps(self) -> None:
        """Forget the units of steps that are complete, which need not be remembered one by one."""
        while True:
            of_next = [unit for unit in self._taken if unit[0] == self.closed + 1]
            if len(of_next) < self._logical_ranks or not all(self.is_complete(unit) for unit in of_next):
                return
            for unit in of_next:
                del self._taken[unit]
            self.closed += 1

    def image(self) -> dict[str, object]:
        """Describe all of it, for a standby."""
        return {"closed": self.closed, "taken": [[*unit, sorted(come)] for unit, come in self._taken.items()]}

    def restore(self, *, closed: int, taken: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Take over the :meth:`image` of the master's log."""
        self.closed = closed
        self._taken = {(step, rank): set(come) for step, rank, come in taken}
