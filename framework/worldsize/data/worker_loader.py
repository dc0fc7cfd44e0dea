"""Loads batches in order, in this process or in data workers: processes that load ahead of it.

:class:`AutoWorkers` chooses the number of workers from the time that steps wait for data.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Protocol, final

import torch
from torch.utils.data import DataLoader

from worldsize.core import Batch, DataWorkersChanged
from worldsize.data.data_wait import DataWait, DataWaitError, Patience, StopBetweenSteps, own_place
from worldsize.data.storage.byte_files import COUNTS
from worldsize.data.worker_process import (
    WorkerStacks,
    abandon,
    begin_worker,
    place_of,
    shared_stacks,
    started,
    worker_context,
)

Request = tuple[int, int]
"""A step, counted from 1, and the logical rank whose batch is wanted: a plain tuple, which is pickled the fastest."""


class Fetcher(Protocol):
    """Loads the batch of a request.

    Its method has the name by which torch's DataLoader asks a data set for a batch.
    """

    def __getitems__(self, request: Request) -> Batch: ...


@final
class _Requests:
    """The requests of each step after ``first``, up to an end that may be set while they are read."""

    def __init__(self, first: int, logical_ranks: Sequence[int]) -> None:
        self._first, self._logical_ranks = first, logical_ranks
        self.last: int | None = None  # step; None: there is no end

    def __iter__(self) -> Iterator[Request]:
        for step in count(self._first + 1):
            if step - 1 == self.last:
                return
            for rank in self._logical_ranks:
                yield step, rank


@final
class WorkerLoader:
    """Loads the batches of the steps after ``first``, in ``processes`` worker processes; 0: in this process."""

    def __init__(
        self, fetcher: Fetcher, first: int, logical_ranks: Sequence[int], device: torch.device, processes: int
    ) -> None:
        self._requests = _Requests(first, logical_ranks)
        self._count = len(logical_ranks)
        self._taken = 0  # batches
        self._stacks: WorkerStacks | None = shared_stacks() if processes else None
        self._loader: Iterator[_Loaded] | None = self._started(fetcher, device, processes) if processes else None
        self._batches = (
            map(_counted_here, self._loader) if self._loader is not None else map(fetcher.__getitems__, self._requests)
        )

    def step(self) -> list[Batch]:
        """Return the batches of the next step."""
        batches = []
        try:
            for _ in range(self._count):
                batches.append(next(self._batches))
                self._taken += 1
        except (DataWaitError, StopBetweenSteps):
            if self._loader is not None:
                abandon(self._loader)
            raise
        return batches

    def place(self) -> str:
        """Describe who loads the next batch, and where that is."""
        return own_place() if self._loader is None else place_of(self._loader, self._taken, self._stacks)

    def ends(self, last: int) -> None:
        """Set the last step to load; nothing beyond it has been asked of workers yet."""
        self._requests.last = last

    def is_at_end(self, step: int) -> bool:
        """Return whether ``step`` was the last one."""
        return step == self._requests.last

    def close(self) -> None:
        """End the workers, which have loaded all there is to load and wait for more."""
        next(self._batches, None)

    def _started(self, fetcher: Fetcher, device: torch.device, processes: int) -> Iterator[_Loaded]:
        loader: DataLoader[_Loaded] = DataLoader(
            fetcher,  # type: ignore[arg-type]  # it is no Dataset, but is asked for batches alone
            batch_sampler=self._requests,  # type: ignore[arg-type]  # a request stands for its list of indices
            collate_fn=_counted,
            num_workers=processes,
            prefetch_factor=PREFETCHED,
            worker_init_fn=partial(begin_worker, os.getpid(), self._stacks),
            pin_memory=device.type == "cuda",
            multiprocessing_context=worker_context(),
        )
        return started(loader)


def loaded(
    fetcher: Fetcher,
    logical_ranks: Sequence[int],
    device: torch.device,
    *,
    first: int,
    workers: int,
    wait: DataWait | None = None,
) -> Iterator[list[Batch]]:
    """Yield the batches of each step after ``first``, without end; ``wait`` watches the waits for them."""
    wait = wait or DataWait(Patience())
    loader = WorkerLoader(fetcher, first, logical_ranks, device, workers)
    for step in count(first + 1):
        with wait.during(step, loader.place):
            batches = loader.step()
        yield batches


def loaded_by(
    auto: AutoWorkers,
    make: Callable[[int, int], WorkerLoader],
    *,
    first: int,
    batches: int,
    wait: DataWait | None = None,
) -> Iterator[list[Batch]]:
    """Yield the batches of each step after ``first``, without end, from as many workers as ``auto`` decides.

    A batch follows from its step, so a new loader goes on where the old one ends. That is some steps after the
    decision, while the old one goes on: the new workers have their first batches by then, and of the old ones' nothing
    is left.

    Args:
        make: returns a loader that begins after a step, with a number of workers.
        batches: how many a step has.
        wait: watches the waits for them; None: nobody does.
    """
    wait = wait or DataWait(Patience())
    loader, following = make(first, auto.number), None
    for step in count(first + 1):
        begun = auto.clock()
        with wait.during(step, loader.place):
            loaded = loader.step()
        ready = auto.clock()
        yield loaded
        if following is None:
            before = auto.number
            if auto.judge(step, wait=ready - begun, rest=auto.clock() - ready, batches=batches):
                last = step + settling_steps(max(before, auto.number), batches)
                loader.ends(last)
                following = make(last, auto.number)
        elif loader.is_at_end(step):
            loader.close()
            loader, following = following, None


_Loaded = tuple[Batch, tuple[int, int, int]]  # a batch, and what the worker has read since its last one


def _counted(batch: Batch) -> _Loaded:
    """Add to a batch of a worker what it has read for it."""
    return batch, COUNTS.taken()


def _counted_here(loaded: _Loaded) -> Batch:
    batch, counts = loaded
    COUNTS.add(*counts)
    return batch


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
