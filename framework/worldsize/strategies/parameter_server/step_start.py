"""A shard's parameters where a step with several updates began: the step is repeated if a worker is lost in it."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any, final

from worldsize.strategies.parameter_server.shard_master import ShardMaster, ignore_step


@final
class StepStart:
    """Keeps a copy of the parameters that ``master`` serves, with their optimizer's state, as a step began.

    Args:
        master: Serves the shard.
        on_begin: Called with the number of each step that begins.
    """

    def __init__(self, master: ShardMaster, on_begin: Callable[[int], None] = ignore_step) -> None:
        self._master, self._on_begin = master, on_begin
        self._kept: Any = None

    def keep(self, step: int) -> None:
        """Keep what is there now: ``step`` begins. Gradients of its first update may have come already."""
        self._on_begin(step)
        with self._master.log.changed:
            self._kept = deepcopy(self._master.shard.parameters.image())

    def roll_back(self, updates: int) -> None:
        """Go back to what was kept, which counts as update number ``updates``; once, however often it is asked for.

        Gradients of the attempt that was given up belong to updates up to that number, so that none that comes late is
        taken for one of the next attempt.
        """
        shard = self._master.shard
        with self._master.log.changed:
            if shard.step < updates:
                shard.parameters.restore(deepcopy(self._kept))  # the optimizer goes on in its tensors
                shard.step = updates
                shard.reset(updates, None)
                self._master.log.changed.notify_all()
