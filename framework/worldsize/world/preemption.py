"""Signals that ask a process to end: the first sets a flag, which all ranks agree on; the next of its kind ends it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from types import FrameType
from typing import final

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: saved, start me again
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_SAME = (
    1.0  # seconds in which a signal that comes again is the same: a scheduler's, and the launcher's that passes it on
)


@final
class Preemption:
    """Handlers for ``names`` in this process; the other signals of SIGNALS keep what they do."""

    def __init__(self, names: Iterable[str]) -> None:
        self._since: dict[int, float] = {}
        for name in names:
            signal.signal(signal.Signals[name], self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a launcher blocks them until here

    def is_wanted(self) -> bool:
        """Whether a signal has come to this process; the other ranks may not know of it yet."""
        return bool(self._since)

    def seconds_left(self, grace: float) -> float:
        """Return how much is left of ``grace`` seconds that began when the first signal came to this process."""
        return grace - (time.monotonic() - min(self._since.values())) if self._since else grace

    def want(self) -> None:
        """Ask for the end as if a signal had come."""
        self._since.setdefault(0, time.monotonic())

    def _note(self, number: int, _: FrameType | None) -> None:
        if time.monotonic() - self._since.setdefault(number, time.monotonic()) > _SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
