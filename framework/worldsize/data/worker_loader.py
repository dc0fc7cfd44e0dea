"""Loads batches one after the other, in this process or in data workers: processes that load ahead of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Protocol, final

import torch
from torch.utils.data import DataLoader

from worldsize.core import Batch
from worldsize.data.auto_workers import PREFETCHED, AutoWorkers, settling_steps
from worldsize.data.data_wait import DataWait, DataWaitError, Patience, StopBetweenSteps, own_place
from worldsize.data.reader_process import abandon, begin_worker, place_of, shared_stacks, started, worker_context
from worldsize.data.storage.read_counts import COUNTS
from worldsize.data.worker_stacks import WorkerStacks

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
