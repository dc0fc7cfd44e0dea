"""Signals that ask a process to end: the first sets a flag on which all ranks agree, a second one ends the process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from types import FrameType
from typing import final

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the run has saved and can be started again
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_SAME = (
    1.0  # seconds within which a repeated signal is a duplicate, sent by the scheduler and forwarded by the launcher
)


def handled(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals without SIGHUP if this process ignores it, as under nohup."""
    return [each for each in numbers if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


def leave_hangups() -> None:
    """Leave SIGHUP to the launching process, by a handler: SIG_IGN stands for nohup."""
    for number in handled([signal.SIGHUP]):
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    """Do nothing about a signal."""


def note(seen: list[int], number: int) -> None:
    """Append a signal to those seen. SIGHUP and one other count as one: a single shutdown may send both."""
    if seen == [signal.SIGHUP]:
        seen[:] = [number]
    elif number != signal.SIGHUP or not seen:
        seen.append(number)


@final
class Preemption:
    """Installs handlers for the signals ``names`` in this process; the others of SIGNALS keep their default action."""

    def __init__(self, names: Iterable[str]) -> None:
        self._since: dict[int, float] = {}
        for number in handled(signal.Signals[name] for name in names):
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the launcher has blocked them until here

    def is_wanted(self) -> bool:
        """Return whether this process has received a signal; the other ranks may not know of it yet."""
        return bool(self._since)

    def seconds_left(self, grace: float) -> float:
        """Return the seconds left of ``grace`` seconds, counted from the first signal to this process."""
        return grace - (time.monotonic() - min(self._since.values())) if self._since else grace

    def want(self) -> None:
        """Request the end as if a signal had been received."""
        self._since.setdefault(0, time.monotonic())

    def _note(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP and self._since:
            return  # as in :func:`note`
        if time.monotonic() - self._since.setdefault(number, time.monotonic()) > _SAME:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
