"""Ends waits for collectives of gloo when the gang ends, even for those that gloo itself would not end.

A message to a peer that dies before all of it is sent is waited for until the timeout of the group: when a connection
ends, gloo tells those who wait for the receipt of a message, but not those whose message is in the transmit queue.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_any
from datetime import timedelta
from functools import partial
from typing import final

from torch.distributed import Work

_SLICE = timedelta(seconds=0.02)  # time between two looks at whether the gang has ended


@final
class Interruption:
    """Whether the waits of this process end when its gang does; there is one in a process."""

    def __init__(self) -> None:
        self._check: Callable[[], None] | None = None
        self._longest = 0.0  # seconds of a wait
        self._keeps = False
        self._in_flight: set[Work] = set()

    def begin(self, check: Callable[[], None] | None, *, longest: float) -> None:
        """Keep what is started from now on, and let waits end when ``check`` raises, or after ``longest`` seconds.

        With None instead of ``check``, waits end by themselves, as those of NCCL do when it is aborted.
        """
        self._check, self._longest, self._keeps = check, longest, True

    def started(self, work: Work) -> None:
        """Keep a collective until it has been waited for, since an exception may come before that."""
        if self._keeps:
            self._in_flight.add(work)

    def wait(self, work: Work) -> None:
        """Wait for a collective; raise what it raises, or what the check does, or RuntimeError if it takes too long."""
        self._watch(work, partial(_has_ended, work))
        work.wait()  # at once, if it has ended

    def wait_for_message(self, work: Work) -> None:
        """Wait for a message to or from one other process, as :meth:`wait` does for a collective.

        This wait cannot be tried again, since gloo closes the connections of a group when it times out; so another
        thread waits, for as long as the message goes on.
        """
        if self._check is None:
            self.wait(work)
            return
        outcome: Future[bool] = Future()
        threading.Thread(target=_tell_end, args=(work, outcome), daemon=True, name="message").start()
        self._watch(work, lambda: bool(wait_for_any([outcome], _SLICE.total_seconds()).done))
        outcome.result()

    def _watch(self, work: Work, has_ended: Callable[[], bool]) -> None:
        """Ask again and again whether ``work`` has ended, and let the check raise in between, if there is one."""
        if self._check is not None:
            self.started(work)
            begun = time.monotonic()
            while not has_ended():
                self._check()
                if time.monotonic() - begun > self._longest:
                    raise RuntimeError(f"timed out: a peer has not answered for {self._longest:g} s")
        self._in_flight.discard(work)

    def unfinished(self) -> list[Work]:
        """Return the collectives that go on, and forget them; whoever destroys their groups waits for them."""
        started, self._in_flight = self._in_flight, set()
        return [work for work in started if not work.is_completed()]


INTERRUPTION = Interruption()


def _has_ended(work: Work) -> bool:
    try:
        work.wait(_SLICE)
    except RuntimeError:  # that of the work, or that the time is over
        return work.is_completed()
    return True


def _tell_end(work: Work, outcome: Future[bool]) -> None:
    try:
        outcome.set_result(work.wait())
    except Exception as error:  # which the thread raises that waits for it
        outcome.set_exception(error)
