"""Processes that do the same at the same time, as those of one machine do, which share its cores and memory."""

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

from worldsize.world.fork import ready_to_fork

T = TypeVar("T")

_TIMEOUT = 600  # seconds that one waits for the others
_WARM_UP, _TURNS = 2, 11


@final
class _Meeting:
    """Where the processes wait for each other; all of them see the moment at which the last one came."""

    def __init__(self, context: BaseContext, count: int) -> None:
        self._moment = context.Value("d", lock=False)
        self._barrier = context.Barrier(count, self._note, _TIMEOUT)

    def _note(self) -> None:
        self._moment.value = time.perf_counter()

    def moment(self) -> float:
        self._barrier.wait()
        return float(self._moment.value)

    def abort(self) -> None:
        self._barrier.abort()


_meetings: list[_Meeting] = []  # in one of the processes: the only one


def together(count: int, threads: int, work: Callable[..., T], *given: Any) -> T:
    """What ``work(*given)`` gives one of ``count`` processes of so many ``threads`` that all do it.

    They are forked: this process must have no OpenMP pool, and must not have used CUDA.

    Raises:
        Exception: what ``work`` raised; BrokenProcessPool where the kernel killed a process.
    """
    context = get_context("fork")
    meeting = _Meeting(context, count)
    with ProcessPoolExecutor(count, context, initializer=_join, initargs=(meeting, threads)) as pool:
        with ready_to_fork():
            parts = [pool.submit(_guarded, work, given) for _ in range(count)]
        errors = [error for part in parts if (error := part.exception()) and not isinstance(error, BrokenBarrierError)]
    if errors:
        raise errors[0]
    return parts[-1].result()


def _join(meeting: _Meeting, threads: int) -> None:
    _meetings.append(meeting)
    torch.set_num_threads(threads)


def _guarded(work: Callable[..., T], given: tuple[Any, ...]) -> T:
    try:
        return work(*given)
    except BaseException:
        _meetings[0].abort()  # the others need not wait
        raise


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Of the slowest of the processes that run ``action`` at the same time; the same in all of them."""
    begun = _meetings[0].moment()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return _meetings[0].moment() - begun


def medians(turns: Iterable[Sequence[Callable[[], object]]], device: torch.device, least_seconds: float) -> list[float]:
    """Of the seconds of each action of a turn, in so many turns that they take ``least_seconds``, and eleven at least:
    where others use the machine too, one second is unlike the next.
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
    """This machine's first of a ``kind``: "cpu" or "cuda"."""
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
