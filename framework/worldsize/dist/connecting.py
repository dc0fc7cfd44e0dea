"""Connects the ranks of new groups that exchange data in most collectives, where gloo would do so only later."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed import ProcessGroup

from worldsize.dist.interruption import INTERRUPTION
from worldsize.dist.step_timer import started
from worldsize.devices import backend_names
from worldsize.world.world import connects_late


def connect(groups: Iterable[ProcessGroup]) -> None:
    """Connect the ranks of each group of gloo that exchange data in rings and trees, unless all are connected already.

    All members of the groups must call it. Such collectives are also waited for by torch itself, and nothing ends its
    wait for a rank that dies before it is connected; this wait ends when the gang does. Collectives between all pairs
    of ranks, and messages, are waited for in the same way.
    """
    if connects_late():
        own = [group for group in groups if set(backend_names(dist.get_backend(group))) == {"gloo"}]
        # a barrier is between ranks whose distance is a power of two, as rings and trees are
        for work in [started(dist.barrier(group, async_op=True)) for group in own]:
            INTERRUPTION.wait(work)
