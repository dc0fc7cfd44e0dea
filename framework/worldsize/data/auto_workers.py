"""Decides how many worker processes load the data of a process, by how long its steps wait for them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import final

from worldsize.core import DataWorkersChanged

PREFETCHED = 2  # batches that each worker process loads ahead, as torch's DataLoader has it
_STEPS = 20  # that a decision looks at
_SETTLING = 5  # steps after a change that say nothing yet: caches are cold, or what was loaded ahead is used up
_SHARE = 0.05  # of the time of a step that may go by without data
_WAIT = 0.0005  # seconds: a shorter wait is not worth it, since a batch from another process takes some of that
_GAIN = 0.25  # share of the wait by which steps must become shorter for a change to have helped


@final
class AutoWorkers:
    """The number of worker processes, 0 at first, then 1, 2, 4 and so on, as long as that makes steps shorter.

    It tries more when steps wait for more than 5 % of their time. If that does not make them shorter by a quarter of
    the wait, it goes back and leaves the number alone, as it does once steps wait for less. What is judged is the mean
    wait, since several workers deliver in bursts, and the median of the rest of a step, since evaluations and
    checkpoints are part of it.

    Each process decides for itself: its cores, its disk and its logical ranks are its own, and no message is needed.
    Where processes wait for each other, those that are alike decide alike, and at the same steps: windows are counted
    in steps, not in seconds.

    Args:
        most: largest number that is tried, 1 or more.
        tell: takes each change.
        rank: number of this process, for the events.
        clock: tells the time of its steps, in seconds.
    """

    def __init__(
        self,
        most: int,
        *,
        tell: Callable[[DataWorkersChanged], None],
        rank: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._most, self._tell, self._rank = most, tell, rank
        self._number = 0
        self._skipped = _SETTLING
        self._waits: list[float] = []
        self._rests: list[float] = []
        self._tried_from: tuple[int, float, float] | None = None  # the number before, its wait and its time of a step
        self._settled = False

    @property
    def number(self) -> int:
        """The number of worker processes that load now."""
        return self._number

    def judge(self, step: int, *, wait: float, rest: float, batches: int) -> bool:
        """Record the times of ``step``, in seconds, and return whether :attr:`number` has changed.

        Args:
            step: number of the step that has ended.
            wait: seconds that the step waited for its data.
            rest: seconds that everything else took.
            batches: how many batches a step takes from the workers.
        """
        if self._settled:
            return False
        if self._skipped:
            self._skipped -= 1
            return False
        self._waits.append(wait)
        self._rests.append(rest)
        if len(self._waits) < _STEPS:
            return False
        before, number = self._number, self._next()
        if number != before:
            share = statistics.fmean(self._waits) / self._seconds()
            self._tell(DataWorkersChanged(step, self._rank, workers=number, before=before, waited=share))
        self._number, self._waits, self._rests = number, [], []
        self._skipped = settling_steps(max(before, number), batches) if number != before else 0
        return number != before

    def _seconds(self) -> float:
        return statistics.fmean(self._waits) + statistics.median(self._rests)

    def _next(self) -> int:
        """Return the number for the steps from now on, by those of the last window."""
        wait, seconds = statistics.fmean(self._waits), self._seconds()
        is_long = wait > max(_WAIT, _SHARE * seconds)
        tries = is_long and self._number < self._most
        if self._tried_from is not None:
            before, wait_before, seconds_before = self._tried_from
            if seconds > seconds_before - _GAIN * wait_before:
                if tries and self._number == 1 and seconds < seconds_before + _GAIN * wait_before:
                    return 2  # one loads no faster than this process did; whether workers help is seen with two
                self._settled = True
                return before
        if tries:
            self._tried_from = self._number, wait, seconds
            return min(2 * self._number or 1, self._most)
        self._settled = self._number > 0
        return self._number


def settling_steps(workers: int, batches: int) -> int:
    """Return after how many steps of ``batches`` batches all that ``workers`` had loaded ahead is used up."""
    return _SETTLING + math.ceil(PREFETCHED * workers / batches)
