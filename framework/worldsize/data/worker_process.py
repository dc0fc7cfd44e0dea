"""Starts and prepares the processes that load data, and shows which sample and line each of them is at.

A data worker shows its position even while it waits for a lock that nobody will release.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count, islice, takewhile
from pickle import PicklingError
from types import FrameType
from typing import Any, TypeVar, final

from torch.utils.data import DataLoader, _utils

from worldsize.core import ConfigError
from worldsize.data.batches import sample_of
from worldsize.data.data_wait import DataWait, DataWaitError, StopBetweenSteps
from worldsize.data.storage.byte_files import COUNTS
from worldsize.world.processes import SIGNALS, die_with_parent

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


_ASK = signal.SIGRTMIN + 5
_SECONDS = 2.0  # that a worker has to answer
_POLL = 0.05
_CALLS = 12  # that are shown of a stack
_LOADER = "torch/utils/data/_utils"  # its calls, and those outside of it, are the same for all data


@final
class WorkerStacks:
    """A file in memory, shared with forked workers, into which they write where they are when they are asked."""

    def __init__(self) -> None:
        self._file = os.memfd_create("data workers")
        weakref.finalize(self, os.close, self._file)
        if threading.current_thread() is threading.main_thread():
            signal.signal(_ASK, signal.SIG_IGN)  # inherited: it does not end a worker that is asked too early

    def answer(self, sample_of: Callable[[FrameType | None], int | None]) -> None:
        """Let this process, a worker, answer. ``sample_of`` finds the sample that is loaded, given the stack."""
        file = self._file

        def note_sample(_: int, frame: FrameType | None) -> None:
            if (sample := sample_of(frame)) is not None:
                os.write(file, f"sample {sample}\n".encode())

        signal.signal(_ASK, note_sample)
        # written by the signal handler in C, whatever the interpreter waits for; then Python's own handler runs
        faulthandler.register(_ASK, file=file, all_threads=False, chain=True)

    def of(self, process: int) -> str:
        """Return what worker ``process`` writes: its stack, the innermost call first, and the sample that it loads."""
        before = os.fstat(self._file).st_size
        try:
            os.kill(process, _ASK)
        except ProcessLookupError:
            return "It has died."
        until, size = time.monotonic() + _SECONDS, before
        while time.monotonic() < until:
            time.sleep(_POLL)
            now = os.fstat(self._file).st_size
            if now == size > before:
                break
            size = now
        return _described(os.pread(self._file, 1 << 16, before).decode(errors="replace").splitlines())

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("only forked workers share the file")


def _described(lines: list[str]) -> str:
    """Describe a worker's answer: the sample, and the calls within the data set, the innermost one first."""
    sample = next((line for line in lines if line.startswith("sample ")), None)
    calls = takewhile(lambda line: _LOADER not in line, (line for line in lines if line.startswith("  File ")))
    if not lines:
        return "It does not say where it is."
    where = f"It loads {sample} and is here" if sample else "It is here"
    return "\n".join([f"{where}, the innermost call first:", *islice(calls, _CALLS)])
