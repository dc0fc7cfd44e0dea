"""Frees the process groups of memberships that have ended, so that training does not wait for their collectives.

Whoever frees a group of gloo waits until its collectives have ended, and one that sends to a process that was killed
goes on until the timeout of the group.
"""

from __future__ import annotations

import gc
import threading
from typing import final

from torch.distributed import ProcessGroup, Work

from worldsize.dist.interruption import INTERRUPTION
from worldsize.world.world import existing_groups

_Left = list[tuple[list[Work], list[ProcessGroup]]]  # of each membership: what goes on, and all groups


@final
class LeftGroups:
    """The groups that this process has left and not freed."""

    def __init__(self) -> None:
        self._left: _Left = []

    def keep(self) -> None:
        """Keep the groups of this process, which it is about to leave."""
        self._left.append((INTERRUPTION.unfinished(), existing_groups()))

    def free(self) -> None:
        """Free the groups to which nothing else refers but garbage, unless collectives in them go on.

        A thread frees them: torch may have started collectives by itself, of which nobody knows whether they go on.
        """
        gc.collect()  # replicas and their groups refer to themselves
        before, self._left = self._left, []
        ended: _Left = []
        while before:  # no name refers to a group when the thread begins
            (self._left if _go_on(before[-1][0]) else ended).append(before.pop())
        threading.Thread(target=ended.clear, daemon=True, name="groups").start()


def _go_on(works: list[Work]) -> bool:
    return not all(map(Work.is_completed, works))


LEFT_GROUPS = LeftGroups()  # for as long as this process lives, also after the last membership
