"""Measures actions in several concurrent processes, which share the cores of this machine as in a run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from threading import BrokenBarrierError
from typing import Any, TypeVar, final

import torch

from worldsize.devices import synchronize
from worldsize.world.fork import ready_to_fork

T = TypeVar("T")

_TIMEOUT = 600  # seconds to wait for the others
_WARM_UP, _TURNS = 2, 11


@final
class SharedBarrier:
    """A barrier that returns the time at which the last process arrived."""

    def __init__(self, context: BaseContext, count: int) -> None:
        self._moment = context.Value("d", lock=False)
        self._barrier = context.Barrier(count, self._note, _TIMEOUT)

    def _note(self) -> None:
        self._moment.value = time.perf_counter()

    def moment(self) -> float:
        """Wait for all processes; return when the last one arrived, in seconds."""
        self._barrier.wait()
        return float(self._moment.value)

    def abort(self) -> None:
        """Break the barrier, so that all waiting processes raise BrokenBarrierError."""
        self._barrier.abort()


_barriers: list[SharedBarrier] = []  # at most one, in a forked process: a barrier can only be inherited


def run_concurrently(count: int, threads: int, work: Callable[..., T], *given: Any) -> T:
    """Call ``work(*given)`` in ``count`` processes of ``threads`` threads at once; return what one of them returns.

    The processes are forked: this one must have no OpenMP pool, and must not have used CUDA.

    Raises:
        Exception: ``work`` raised it in one of them.
        BrokenProcessPool: the kernel killed a process.
    """
    context = get_context("fork")
    barrier = SharedBarrier(context, count)
    with ProcessPoolExecutor(count, context, initializer=_join, initargs=(barrier, threads)) as pool:
        with ready_to_fork():
            parts = [pool.submit(_guarded, work, given) for _ in range(count)]
        errors = [error for part in parts if (error := part.exception()) and not isinstance(error, BrokenBarrierError)]
    if errors:
        raise errors[0]
    return parts[-1].result()


def _join(barrier: SharedBarrier, threads: int) -> None:
    _barriers.append(barrier)
    torch.set_num_threads(threads)


def _guarded(work: Callable[..., T], given: tuple[Any, ...]) -> T:
    try:
        return work(*given)
    except BaseException:
        _barriers[0].abort()  # the others need not wait
        raise


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Run ``action`` in all processes at once; return the seconds of the slowest, the same in each."""
    begun = _barriers[0].moment()
    action()
    synchronize(device)
    return _barriers[0].moment() - begun


def medians(turns: Iterable[Sequence[Callable[[], object]]], device: torch.device, least_seconds: float) -> list[float]:
    """Return the median seconds of each action of a turn.

    There are at least eleven turns, and enough to take ``least_seconds``, since other users of the machine cause noise.
    """
    taken: list[list[float]] = []
    spent = 0.0
    for number, turn in enumerate(turns):
        seconds = [_seconds(action, device) for action in turn]
        if number < _WARM_UP:
            continue
        taken.append(seconds)
        spent += sum(seconds)
        if len(taken) >= _TURNS and spent >= least_seconds:
            break
    return [statistics.median(each) for each in zip(*taken, strict=True)]


def first_device(kind: str) -> torch.device:
    """Return this machine's first device of a ``kind``, such as "cpu" or "cuda"."""
    return torch.device(kind, 0) if kind != "cpu" else torch.device(kind)
