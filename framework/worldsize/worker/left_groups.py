"""Frees the process groups of memberships that have ended, so that training does not wait for their collectives.

Whoever frees a group of gloo waits until its collectives have ended, and one that sends to a process that was killed
goes on until the timeout of the group.
"""

from __future__ import annotations

import gc
import sys
import threading
from typing import final

from torch.distributed import ProcessGroup, Work

from worldsize.collectives.interruption import INTERRUPTION
from worldsize.world.world import existing_groups

_ONLY_LISTED = 2  # references: that of the list, and that of the call which counts them
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

        A thread frees them: torch may have started collectives by itself, of which nobody knows whether they go on. So
        groups that are in use elsewhere stay here, too: else whoever lets go of them last would wait.
        """
        gc.collect()  # replicas and their groups refer to themselves
        free: list[ProcessGroup] = []
        for works, groups in self._left:
            if all(map(Work.is_completed, works)):
                works.clear()
                _move_unshared(groups, free)
        self._left = [each for each in self._left if each[1]]
        threading.Thread(target=free.clear, daemon=True, name="groups").start()


def _move_unshared(groups: list[ProcessGroup], free: list[ProcessGroup]) -> None:
    """Move the groups to which only the list refers; no name does, either, when the thread begins."""
    for place in reversed(range(len(groups))):
        if sys.getrefcount(groups[place]) == _ONLY_LISTED:
            free.append(groups.pop(place))


LEFT_GROUPS = LeftGroups()  # for as long as this process lives, also after the last membership
