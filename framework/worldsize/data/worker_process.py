"""Start and set up data workers, and report their current sample and line of code.

The position is available even if a data worker is deadlocked.
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
from worldsize.data.batches import find_current_sample
from worldsize.data.data_wait import DataWait, DataWaitError, StopBetweenSteps
from worldsize.data.storage.byte_files import COUNTS
from worldsize.world.processes import SIGNALS, die_with_parent

T = TypeVar("T")


def worker_context() -> str:
    """Return the start method of data workers: the one set in ``multiprocessing``, or fork.

    Raises:
        ConfigError: the start method is forkserver, whose workers would outlive the training process.
    """
    method = multiprocessing.get_start_method(allow_none=True) or "fork"
    if method == "forkserver":
        raise ConfigError(
            "the multiprocessing start method forkserver is not supported: data workers would outlive the training "
            "process. Call multiprocessing.set_start_method('fork') or 'spawn', or set data_workers=0."
        )
    return method


def start_loader(loader: DataLoader[T]) -> Iterator[T]:
    """Start the workers of a loader and return its iterator.

    Raises:
        ConfigError: the workers are spawned, and the data cannot be pickled.
    """
    try:
        return iter(loader)
    except (PicklingError, AttributeError, TypeError) as error:
        if worker_context() == "fork":
            raise
        raise ConfigError(
            f"spawned data workers require picklable data: {error}. Define functions used by the data at module "
            "level, call multiprocessing.set_start_method('fork'), or set data_workers=0."
        ) from error


def create_shared_stacks() -> WorkerStacks | None:
    """Return a shared file for stacks of forked workers, or None if workers are spawned."""
    return WorkerStacks() if worker_context() == "fork" else None


def describe_worker(batches: Iterator[Any], number: int, stacks: WorkerStacks | None) -> str:
    """Describe the position of the worker that loads batch ``number`` (from 0) of an iterator."""
    workers = batches._workers  # type: ignore[attr-defined]  # not in torch's public API
    worker = workers[number % len(workers)]  # round-robin
    where = "Stacks of spawned workers are not available." if stacks is None else stacks.describe_process(worker.pid)
    return f"Data worker {number % len(workers)} (process {worker.pid}) is loading the data. {where}"


def kill_workers(batches: Iterator[Any]) -> None:
    """Kill an iterator's workers without torch's shutdown, which waits seconds for each."""
    if batches._worker_pids_set:  # type: ignore[attr-defined]  # otherwise torch's signal handler reports a failure
        _utils.signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
        batches._worker_pids_set = False  # type: ignore[attr-defined]
    for worker in batches._workers:  # type: ignore[attr-defined]
        worker.kill()


def monitor_steps(
    steps: Iterator[T],
    first: int,
    place: Callable[[], str],
    wait: DataWait,
    unwatched: int,
    *,
    ahead: bool,
) -> Iterator[T]:
    """Yield ``steps``, and monitor the wait for each step except ``unwatched``.

    Without ``ahead``, this process reads the stream itself, and cannot stop within a step, since that would lose
    the stream's position.
    """
    for number in count(first + 1):
        with nullcontext() if number == unwatched else wait.monitor_step(number, place, may_stop=ahead):
            try:
                step = next(steps)
            except (DataWaitError, StopBetweenSteps):
                if ahead:
                    kill_workers(steps)
                raise
        yield step


def begin_worker(parent: int, stacks: WorkerStacks | None, _: int) -> None:
    """Set up a data worker.

    It exits when process ``parent`` dies, ignores signals, and resets its read statistics.
    """
    COUNTS.reset()
    if stacks is not None:
        stacks.install_signal_handler(find_current_sample)
    die_with_parent(parent)
    for number in SIGNALS:  # a stop signal may be sent to all processes, but workers are needed until training ends
        signal.signal(number, signal.SIG_IGN)


def begin_reader(parent: int, stacks: WorkerStacks | None, worker: int) -> None:
    """Set up a stream's reader process.

    The stream must not detect that it runs in a DataLoader worker. In a DataLoader worker, even a single one,
    ``datasets`` shuffles in a different order.
    """
    begin_worker(parent, stacks, worker)
    _utils.worker._worker_info = None


_ASK = signal.SIGRTMIN + 5
_SECONDS = 2.0  # seconds to wait for a worker's answer
_POLL = 0.05  # seconds between two checks for an answer
_CALLS = 12  # maximum number of calls to show
_LOADER = "torch/utils/data/_utils"  # stacks are cut here; outer calls are the same for all data


@final
class WorkerStacks:
    """In-memory file shared with forked workers, which write their stacks to it on request."""

    def __init__(self) -> None:
        self._file = os.memfd_create("data workers")
        weakref.finalize(self, os.close, self._file)
        if threading.current_thread() is threading.main_thread():
            signal.signal(_ASK, signal.SIG_IGN)  # inherited, so that an early request does not kill a worker

    def install_signal_handler(self, sample_of: Callable[[FrameType | None], int | None]) -> None:
        """Install a worker's signal handler; ``sample_of`` finds the current sample on a stack."""
        file = self._file

        def note_sample(_: int, frame: FrameType | None) -> None:
            if (sample := sample_of(frame)) is not None:
                os.write(file, f"sample {sample}\n".encode())

        signal.signal(_ASK, note_sample)
        # the C handler writes the stack even if the interpreter is blocked; Python's handler runs later
        faulthandler.register(_ASK, file=file, all_threads=False, chain=True)

    def describe_process(self, process: int) -> str:
        """Request and describe a worker's position: its sample and stack, innermost call first."""
        before = os.fstat(self._file).st_size
        try:
            os.kill(process, _ASK)
        except ProcessLookupError:
            return "The worker has exited."
        until, size = time.monotonic() + _SECONDS, before
        while time.monotonic() < until:
            time.sleep(_POLL)
            now = os.fstat(self._file).st_size
            if now == size > before:
                break
            size = now
        return _format_answer(os.pread(self._file, 1 << 16, before).decode(errors="replace").splitlines())

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("only forked workers share the file")


def _format_answer(lines: list[str]) -> str:
    """Format a worker's answer: sample and calls within the data set, innermost call first."""
    sample = next((line for line in lines if line.startswith("sample ")), None)
    calls = takewhile(lambda line: _LOADER not in line, (line for line in lines if line.startswith("  File ")))
    if not lines:
        return "The worker did not report its stack."
    where = f"It is loading {sample}. " if sample else ""
    return "\n".join([f"{where}Stack (most recent call first):", *islice(calls, _CALLS)])
