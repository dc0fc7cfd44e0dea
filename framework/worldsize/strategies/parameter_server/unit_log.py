"""Record of the units that a shard has applied while steps overlap. Pure logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final


@final
class UnitLog:
    """Records which gradients of each unit have arrived, so that each is applied once even if it is repeated.

    A unit is identified by its step and its first logical rank.

    Args:
        closed: The last step whose units are all applied.
        logical_ranks: Number of units of a step.
        gradients: Number of gradients of a unit: one per bucket and one per table.

    Attributes:
        closed: The last step such that it and all earlier steps are complete.
    """

    def __init__(self, closed: int, *, logical_ranks: int, gradients: int) -> None:
        self.closed = closed
        self._logical_ranks, self._gradients = logical_ranks, gradients
        self._taken: dict[tuple[int, int], set[int]] = {}  # of steps after `closed`

    def add(self, unit: tuple[int, int], index: int) -> bool:
        """Record that gradient ``index`` of a unit has arrived; return False if it was recorded before."""
        if unit[0] <= self.closed or index in self._taken.get(unit, ()):
            return False
        self._taken.setdefault(unit, set()).add(index)
        return True

    def is_complete(self, unit: tuple[int, int]) -> bool:
        """Return whether all gradients of a unit have arrived."""
        return len(self._taken[unit]) == self._gradients

    def close_steps(self) -> None:
        """Forget the units of complete steps, for which ``closed`` is enough."""
        while True:
            of_next = [unit for unit in self._taken if unit[0] == self.closed + 1]
            if len(of_next) < self._logical_ranks or not all(self.is_complete(unit) for unit in of_next):
                return
            for unit in of_next:
                del self._taken[unit]
            self.closed += 1

    def image(self) -> dict[str, object]:
        """Return the complete record, for a standby."""
        return {"closed": self.closed, "taken": [[*unit, sorted(come)] for unit, come in self._taken.items()]}

    def restore(self, *, closed: int, taken: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Load the :meth:`image` of the master's log."""
        self.closed = closed
        self._taken = {(step, rank): set(come) for step, rank, come in taken}
