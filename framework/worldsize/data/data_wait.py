"""Watchdog that warns about long waits for data, and ends them on a stop or timeout."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from worldsize.errors import WorldsizeError

_logger = logging.getLogger(__name__)

_WARNED = 10.0  # seconds of waiting before a warning
_LOOK = 1.0  # seconds between two checks of the current wait
_FRAMES = 6  # innermost stack frames to show
_WAKE = signal.SIGRTMIN + 4  # interrupts the main thread's system call
_REMEDY = (
    "A common cause of a hang is a lock or connection in use by another thread when the data workers were forked. "
    "Create locks and connections in the worker, call multiprocessing.set_start_method('spawn'), or set "
    "data_workers=0. If storage is slow, increase cluster.timeout."
)


@final
class DataWaitError(WorldsizeError):
    """The data for a step did not arrive within the time limit."""


class StopBetweenSteps(BaseException):
    """Interrupts a wait for data when all ranks have agreed to stop before the step."""


@final
@dataclass(frozen=True)
class Patience:
    """Limits on waits for data.

    Attributes:
        seconds: Maximum wait; None disables the watchdog.
        speaks: Whether this process logs long waits; one process is enough.
        stops: Takes a step's number and returns whether all ranks stop before it; may block until all ranks vote.
    """

    seconds: float | None = None
    speaks: bool = False
    stops: Callable[[int], bool] = lambda step: False


@final
@dataclass
class _Wait:
    step: int
    describe: Callable[[], str]
    may_stop: bool
    begun: float
    is_warned: bool = False
    error: BaseException | None = None


@final
class DataWait:
    """Watchdog thread that monitors the main thread's waits for data, one at a time."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._closed = threading.Event()
        self._open: _Wait | None = None
        self._judging = threading.Lock()  # held by the watchdog thread while it votes or signals

    @contextmanager
    def run_watchdog(self) -> Iterator[None]:
        """Run the watchdog thread within the block; does nothing outside of the main thread."""
        if self._patience.seconds is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(_WAKE, self._interrupt)
        threading.Thread(target=self._watch_main_thread, name="data watch", daemon=True).start()
        try:
            yield
        finally:
            self._closed.set()
            self._open = None
            with self._judging:  # no signal may follow: once the old handler is restored, it would kill the process
                signal.signal(_WAKE, before)

    @contextmanager
    def monitor_step(self, step: int, describe: Callable[[], str], *, may_stop: bool = True) -> Iterator[None]:
        """Monitor the block, which waits for the data of ``step``.

        Args:
            step: Number of the step.
            describe: Describes the wait in full sentences, for messages; called from the watchdog thread.
            may_stop: Whether the run can stop here and save its state before the step.

        Raises:
            DataWaitError: the data did not arrive within the time limit.
            StopBetweenSteps: all ranks stop before the step.
            Exception: the vote on stopping failed, for example because the store is gone.
        """
        wait = self._open = _Wait(step, describe, may_stop, time.monotonic())
        try:
            yield
        finally:
            self._open = None
        with self._judging:  # if the data arrived during a vote, obey its result, as the other ranks do
            if wait.error is not None and not isinstance(wait.error, DataWaitError):
                raise wait.error

    def _interrupt(self, *_: Any) -> None:
        wait = self._open
        if wait is not None and wait.error is not None:
            self._open = None  # raise it only once
            raise wait.error

    def _watch_main_thread(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not self._closed.wait(_LOOK):
            wait = self._open
            if wait is not None and time.monotonic() - wait.begun >= _LOOK:
                self._check_wait(wait)
                with self._judging:
                    if wait.error is not None and self._open is wait:
                        signal.pthread_kill(main, _WAKE)

    def _check_wait(self, wait: _Wait) -> None:
        """Set the wait's error if it must end; log a warning if it is long."""
        if wait.error is None and wait.may_stop:
            self._vote_on_stop(wait)
        patience, waited = self._patience, time.monotonic() - wait.begun
        if wait.error is not None:
            return
        if patience.seconds is not None and waited > patience.seconds:
            wait.error = DataWaitError(f"{_format_wait(wait, waited)}\n{_REMEDY}")
        elif patience.speaks and waited >= _WARNED and not wait.is_warned:
            wait.is_warned = True
            _logger.warning("%s", _format_wait(wait, waited))

    def _vote_on_stop(self, wait: _Wait) -> None:
        """Vote on stopping; set the wait's error if all ranks stop.

        :meth:`monitor_step` waits for the vote to end.
        """
        with self._judging:
            try:
                if self._open is wait and self._patience.stops(wait.step):
                    wait.error = StopBetweenSteps()
            except Exception as error:  # end the run: the other ranks may have counted this rank's vote
                wait.error = error


def _format_wait(wait: _Wait, seconds: float) -> str:
    try:
        place = wait.describe()
    except Exception as error:  # any error, since the main thread may be modifying the loader
        place = f"The loading process is unknown: {error!r}."
    return f"step {wait.step} has been waiting for data for {seconds:.0f} s. {place}"


def own_place() -> str:
    """Describe the main thread's position in the code, for a process that loads the data itself."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_list(traceback.extract_stack(frame)[-_FRAMES:])) if frame else ""
    return f"This process loads the data. Stack (most recent call last):\n{stack.rstrip()}"
