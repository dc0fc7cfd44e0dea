"""Saves a shard's parameters at the start of a step with several updates, which is repeated if a worker is lost."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, final

from worldsize.strategies.parameter_server.shard_master import ShardMaster, ignore_step


@final
class StepStart:
    """Saves a copy of the parameters that ``master`` serves, with their optimizer's state, at the start of a step.

    Args:
        master: Serves the shard.
        on_begin: Called with the number of each step that begins.
    """

    def __init__(self, master: ShardMaster, on_begin: Callable[[int], None] = ignore_step) -> None:
        self._master, self._on_begin = master, on_begin
        self._kept: Any = None

    def keep(self, step: int) -> None:
        """Save the present state, at the start of ``step``. Gradients of its first update may have arrived already."""
        self._on_begin(step)
        with self._master.log.changed:
            self._kept = deepcopy(self._master.shard.parameters.image())

    def roll_back(self, updates: int) -> None:
        """Restore the saved state, and count it as update number ``updates``. Repeated calls have no effect.

        Gradients of the abandoned attempt belong to updates up to that number, so that late ones are not mistaken for
        gradients of the next attempt.
        """
        shard = self._master.shard
        with self._master.log.changed:
            if shard.step < updates:
                shard.parameters.restore(deepcopy(self._kept))  # a copy, since the optimizer changes these tensors
                shard.step = updates
                shard.reset(updates, None)
                self._master.log.changed.notify_all()
