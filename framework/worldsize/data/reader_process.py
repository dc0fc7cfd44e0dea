"""Prepares the processes that load data for a training process."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count
from pickle import PicklingError
from typing import Any, TypeVar

from torch.utils.data import DataLoader, _utils

from worldsize.core import ConfigError
from worldsize.data.data_wait import DataWait, DataWaitError, StopBetweenSteps
from worldsize.data.fetch import sample_of
from worldsize.data.storage.read_counts import COUNTS
from worldsize.data.worker_stacks import WorkerStacks
from worldsize.world.parent import die_with_parent
from worldsize.world.preemption import SIGNALS

T = TypeVar("T")


def worker_context() -> str:
    """Return how data workers are started: forked, or as ``multiprocessing.set_start_method`` was told.

    Raises:
        ConfigError: by a server, whose children do not end with the process that they load for.
    """
    method = multiprocessing.get_start_method(allow_none=True) or "fork"
    if method == "forkserver":
        raise ConfigError(
            "data workers of multiprocessing's forkserver would outlive the process that they load for. Call "
            "multiprocessing.set_start_method('fork') or 'spawn', or set data_workers=0."
        )
    return method


def started(loader: DataLoader[T]) -> Iterator[T]:
    """Start the workers of a loader.

    Raises:
        ConfigError: they are spawned, and what they load from cannot be sent to them.
    """
    try:
        return iter(loader)
    except (PicklingError, AttributeError, TypeError) as error:
        if worker_context() == "fork":
            raise
        raise ConfigError(
            f"data workers are spawned, and the data cannot be sent to them: {error}. Define the functions that the "
            "data use at the top of a module, call multiprocessing.set_start_method('fork'), or set data_workers=0."
        ) from error


def shared_stacks() -> WorkerStacks | None:
    """Return where data workers write their stacks; None: they are spawned, and share no file."""
    return WorkerStacks() if worker_context() == "fork" else None


def place_of(batches: Iterator[Any], number: int, stacks: WorkerStacks | None) -> str:
    """Describe the worker that loads batch ``number``, counted from 0, of a loader's iterator."""
    workers = batches._workers  # type: ignore[attr-defined]  # torch has no public way to them
    worker = workers[number % len(workers)]  # in turn
    where = "Its stack is not known, since it is spawned." if stacks is None else stacks.of(worker.pid)
    return f"Data worker {number % len(workers)} (process {worker.pid}) loads them. {where}"


def abandon(batches: Iterator[Any]) -> None:
    """Kill the workers of a loader's iterator, which may hang; joining them would take torch seconds for each."""
    if batches._worker_pids_set:  # type: ignore[attr-defined]  # else torch's handler takes it for a failure
        _utils.signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
        batches._worker_pids_set = False  # type: ignore[attr-defined]
    for worker in batches._workers:  # type: ignore[attr-defined]
        worker.kill()


def watched(
    steps: Iterator[T],
    first: int,
    place: Callable[[], str],
    wait: DataWait,
    unwatched: int,
    *,
    ahead: bool,
) -> Iterator[T]:
    """Yield ``steps``, and watch the waits for them but that for step ``unwatched``.

    The position of a stream that this process reads itself, not ``ahead``, is lost within a step.
    """
    for number in count(first + 1):
        with nullcontext() if number == unwatched else wait.during(number, place, may_stop=ahead):
            try:
                step = next(steps)
            except (DataWaitError, StopBetweenSteps):
                if ahead:
                    abandon(steps)
                raise
        yield step


def begin_worker(parent: int, stacks: WorkerStacks | None, _: int) -> None:
    """Let this process die with the process ``parent``, leave signals to it, and count only what is read here."""
    COUNTS.reset()
    if stacks is not None:
        stacks.answer(sample_of)
    die_with_parent(parent)
    for number in SIGNALS:  # they may reach every process; this one is needed until the training process ends
        signal.signal(number, signal.SIG_IGN)


def begin_reader(parent: int, stacks: WorkerStacks | None, worker: int) -> None:
    """Prepare the one process that reads a stream, and hide from the stream that it is a worker of a DataLoader.

    In such a worker ``datasets`` shuffles in another order, even if there is only one.
    """
    begin_worker(parent, stacks, worker)
    _utils.worker._worker_info = None
