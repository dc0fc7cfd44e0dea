"""Lets ranks that all wait for something other than each other decide together to stop, without a collective."""

from __future__ import annotations

import time
from typing import final

import torch.distributed as dist

from worldsize.core import World

_SECONDS = 10.0  # that ranks wait for the votes of the others; one that computes does not vote
_POLL = 0.05
_STOP, _GO_ON = b"stop", b"go on"


@final
class StopVote:
    """The votes of the ranks of ``world``, in the store through which they met; all hold after the same step."""

    def __init__(self, world: World) -> None:
        self._size, self._key = world.size, f"stop_vote/{world.role}"
        self._voted = -1  # the last step that this rank voted at

    def passes(self, step: int) -> bool:
        """Vote to stop after ``step``; return whether all ranks did so in time, on all ranks alike."""
        if self._size == 1:
            return True
        if self._voted == step:
            return False
        self._voted = step
        store, key = dist.distributed_c10d._get_default_store(), f"{self._key}/{step}"
        until = time.monotonic() + _SECONDS
        decision = b""
        store.add(f"{key}/votes", 1)
        while not decision:
            if store.add(f"{key}/votes", 0) >= self._size:
                decision = store.compare_set(f"{key}/decision", "", _STOP.decode())
            elif time.monotonic() > until:
                decision = store.compare_set(f"{key}/decision", "", _GO_ON.decode())
            elif store.check([f"{key}/decision"]):
                decision = store.get(f"{key}/decision")
            else:
                time.sleep(_POLL)
        return decision == _STOP
