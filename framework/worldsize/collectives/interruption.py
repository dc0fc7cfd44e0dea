"""Ends waits for collectives of gloo when the gang ends, even for those that gloo itself would not end.

A message to a peer that dies before all of it is sent is waited for until the timeout of the group: when a connection
ends, gloo tells those who wait for the receipt of a message, but not those whose message is in the transmit queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import final

from torch.distributed import Work

_SLICE = timedelta(seconds=0.02)  # time between two looks at whether the gang has ended


@final
class Interruption:
    """Whether the waits of this process end when its gang does; there is one in a process."""

    def __init__(self) -> None:
        self._check: Callable[[], None] | None = None
        self._longest = 0.0  # seconds of a wait
        self._unfinished: list[Work] = []

    def begin(self, check: Callable[[], None], *, longest: float) -> None:
        """Let waits end from now on as soon as ``check`` raises, or after ``longest`` seconds."""
        self._check, self._longest = check, longest

    def wait(self, work: Work) -> None:
        """Wait for a collective; raise what it raises, or what the check does, or RuntimeError if it takes too long."""
        if self._check is None:
            work.wait()
            return
        begun = time.monotonic()
        while not _has_ended(work):
            try:
                self._check()
                if time.monotonic() - begun > self._longest:
                    raise RuntimeError(f"timed out: a peer has not answered for {self._longest:g} s")
            except Exception:
                self._unfinished.append(work)
                raise
        work.wait()  # at once

    def leave(self, work: Work) -> None:
        """Wait no more for a collective that goes on."""
        self._unfinished.append(work)

    def unfinished(self) -> list[Work]:
        """Return the collectives whose waits were ended while they went on; their groups must not be destroyed yet."""
        self._unfinished = [work for work in self._unfinished if not work.is_completed()]
        return [*self._unfinished]


INTERRUPTION = Interruption()


def _has_ended(work: Work) -> bool:
    try:
        work.wait(_SLICE)
    except RuntimeError:  # that of the work, or that the time is over
        return work.is_completed()
    return True
