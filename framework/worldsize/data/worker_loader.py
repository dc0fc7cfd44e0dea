"""Load batches in order, in this process or ahead of time in data workers.

:class:`AutoWorkers` adjusts the number of workers to the time that steps spend waiting for data.
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
    begin_worker,
    create_shared_stacks,
    describe_worker,
    kill_workers,
    start_loader,
    worker_context,
)

Request = tuple[int, int]
"""Step (from 1) and logical rank of a batch to load. A plain tuple, since it is the fastest to pickle."""


class Fetcher(Protocol):
    """Loads the batch for a request; a DataLoader calls ``__getitems__`` with a list of indices."""

    def __getitems__(self, request: Request) -> Batch: ...


@final
class _Requests:
    """Iterable of the requests for steps after ``first``; endless until ``last`` is set."""

    def __init__(self, first: int, logical_ranks: Sequence[int]) -> None:
        self._first, self._logical_ranks = first, logical_ranks
        self.last: int | None = None  # last step; None: endless

    def __iter__(self) -> Iterator[Request]:
        for step in count(self._first + 1):
            if step - 1 == self.last:
                return
            for rank in self._logical_ranks:
                yield step, rank


@final
class WorkerLoader:
    """Loads the batches after step ``first``, in ``processes`` workers (0: in this process)."""

    def __init__(
        self, fetcher: Fetcher, first: int, logical_ranks: Sequence[int], device: torch.device, processes: int
    ) -> None:
        self._requests = _Requests(first, logical_ranks)
        self._count = len(logical_ranks)
        self._taken = 0  # number of batches returned
        self._stacks: WorkerStacks | None = create_shared_stacks() if processes else None
        self._loader: Iterator[_Loaded] | None = self._start_workers(fetcher, device, processes) if processes else None
        self._batches = (
            map(_record_counts, self._loader) if self._loader is not None else map(fetcher.__getitems__, self._requests)
        )

    def load_step(self) -> list[Batch]:
        """Return the batches of the next step."""
        batches = []
        try:
            for _ in range(self._count):
                batches.append(next(self._batches))
                self._taken += 1
        except (DataWaitError, StopBetweenSteps):
            if self._loader is not None:
                kill_workers(self._loader)
            raise
        return batches

    def describe_position(self) -> str:
        """Describe the process that loads the next batch and its position in the code."""
        return own_place() if self._loader is None else describe_worker(self._loader, self._taken, self._stacks)

    def set_last_step(self, last: int) -> None:
        """Set the last step to load. Call this before any later batch is requested from the workers."""
        self._requests.last = last

    def is_at_end(self, step: int) -> bool:
        """Return whether ``step`` is the last one to load."""
        return step == self._requests.last

    def close(self) -> None:
        """Stop the workers, after the last step has been loaded."""
        next(self._batches, None)

    def _start_workers(self, fetcher: Fetcher, device: torch.device, processes: int) -> Iterator[_Loaded]:
        loader: DataLoader[_Loaded] = DataLoader(
            fetcher,  # type: ignore[arg-type]  # not a Dataset, but only __getitems__ is called
            batch_sampler=self._requests,  # type: ignore[arg-type]  # a request stands in for a list of indices
            collate_fn=_attach_counts,
            num_workers=processes,
            prefetch_factor=PREFETCHED,
            worker_init_fn=partial(begin_worker, os.getpid(), self._stacks),
            pin_memory=device.type == "cuda",
            multiprocessing_context=worker_context(),
        )
        return start_loader(loader)


def load_batches(
    fetcher: Fetcher,
    logical_ranks: Sequence[int],
    device: torch.device,
    *,
    first: int,
    workers: int,
    wait: DataWait | None = None,
) -> Iterator[list[Batch]]:
    """Yield each step's batches after ``first``, endlessly; ``wait`` monitors the waits."""
    wait = wait or DataWait(Patience())
    loader = WorkerLoader(fetcher, first, logical_ranks, device, workers)
    for step in count(first + 1):
        with wait.monitor_step(step, loader.describe_position):
            batches = loader.load_step()
        yield batches


def load_with_auto_workers(
    auto: AutoWorkers,
    make: Callable[[int, int], WorkerLoader],
    *,
    first: int,
    batches: int,
    wait: DataWait | None = None,
) -> Iterator[list[Batch]]:
    """Yield each step's batches after ``first``, endlessly, with workers chosen by ``auto``.

    Batches depend only on their step, so a new loader can continue where the old one ends. The switch happens some
    steps after the decision, so that all prefetched batches are used while the new workers load their first batches.

    Args:
        make: takes a step and a number of workers, and returns a loader for the steps after it.
        batches: number of batches per step.
        wait: monitors the waits for data; None disables this.
    """
    wait = wait or DataWait(Patience())
    loader, following = make(first, auto.number), None
    for step in count(first + 1):
        begun = auto.clock()
        with wait.monitor_step(step, loader.describe_position):
            loaded = loader.load_step()
        ready = auto.clock()
        yield loaded
        if following is None:
            before = auto.number
            if auto.record_step(step, wait=ready - begun, rest=auto.clock() - ready, batches=batches):
                last = step + settling_steps(max(before, auto.number), batches)
                loader.set_last_step(last)
                following = make(last, auto.number)
        elif loader.is_at_end(step):
            loader.close()
            loader, following = following, None


_Loaded = tuple[Batch, tuple[int, int, int]]  # a batch, and the worker's read statistics for it


def _attach_counts(batch: Batch) -> _Loaded:
    """Attach the worker's read statistics to its batch."""
    return batch, COUNTS.pop_counts()


def _record_counts(loaded: _Loaded) -> Batch:
    batch, counts = loaded
    COUNTS.add(*counts)
    return batch


PREFETCHED = 2  # batches that each worker loads ahead, the default of torch's DataLoader
_STEPS = 20  # steps per decision
_SETTLING = 5  # steps to ignore after a change, while caches are cold or prefetched batches remain
_SHARE = 0.05  # tolerated wait for data, as a share of the step time
_WAIT = 0.0005  # seconds; shorter waits are ignored, since fetching a finished batch takes a similar time
_GAIN = 0.25  # minimum gain of a helpful change, as a share of the previous wait


@final
class AutoWorkers:
    """Adaptive number of worker processes: 0, 1, 2, 4 and so on, while steps become faster.

    More workers are tried if steps wait for data for more than 5 % of their time. If that does not shorten steps by at
    least a quarter of the wait, the previous number is restored and kept. If one worker is only about as fast as none,
    two are tried first. A positive number is also kept once steps wait for less than 5 %. Decisions use the mean wait,
    since several workers deliver in bursts, and the median of the remaining step time, since that can include
    evaluations and checkpoints.

    Each process decides on its own, without communication, since cores, disks and logical ranks can differ. If
    processes wait for each other, similar ones decide alike at the same steps, since windows are measured in steps.

    Args:
        most: maximum number of workers, 1 or more.
        tell: called with an event for each change.
        rank: rank of this process, for the events.
        clock: returns the current time in seconds.
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
        self._tried_from: tuple[int, float, float] | None = None  # previous number, and its wait and step time
        self._settled = False

    @property
    def number(self) -> int:
        """Current number of worker processes."""
        return self._number

    def record_step(self, step: int, *, wait: float, rest: float, batches: int) -> bool:
        """Record the times of ``step`` and return whether :attr:`number` has changed.

        Args:
            step: number of the step that has ended.
            wait: seconds that the step waited for its data.
            rest: seconds that the rest of the step took.
            batches: number of batches per step.
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
        before, number = self._number, self._choose_workers()
        if number != before:
            share = statistics.fmean(self._waits) / self._estimate_step_seconds()
            self._tell(DataWorkersChanged(step, self._rank, workers=number, before=before, waited=share))
        self._number, self._waits, self._rests = number, [], []
        self._skipped = settling_steps(max(before, number), batches) if number != before else 0
        return number != before

    def _estimate_step_seconds(self) -> float:
        return statistics.fmean(self._waits) + statistics.median(self._rests)

    def _choose_workers(self) -> int:
        """Return the number of workers for the next steps, based on the last window of steps."""
        wait, seconds = statistics.fmean(self._waits), self._estimate_step_seconds()
        is_long = wait > max(_WAIT, _SHARE * seconds)
        tries = is_long and self._number < self._most
        if self._tried_from is not None:
            before, wait_before, seconds_before = self._tried_from
            if seconds > seconds_before - _GAIN * wait_before:
                if tries and self._number == 1 and seconds < seconds_before + _GAIN * wait_before:
                    return 2  # one worker is no faster than this process; two show whether workers help
                self._settled = True
                return before
        if tries:
            self._tried_from = self._number, wait, seconds
            return min(2 * self._number or 1, self._most)
        self._settled = self._number > 0
        return self._number


def settling_steps(workers: int, batches: int) -> int:
    """Return the steps after a change until prefetched batches are used up and caches are warm."""
    return _SETTLING + math.ceil(PREFETCHED * workers / batches)
