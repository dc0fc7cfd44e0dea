"""Bounds each wait for data: a warning at first, an error at the end, and a stop in between if one is wanted."""

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

_WARNED = 10.0  # seconds of a wait after which a line says so
_LOOK = 1.0  # seconds between two looks
_FRAMES = 6  # of a stack, the innermost ones
_WAKE = signal.SIGRTMIN + 4  # ends the system call in which the main thread waits
_REMEDY = (
    "If it hangs, look for a lock or a connection that another thread held when the data workers were forked: open it "
    "in the worker, call multiprocessing.set_start_method('spawn'), or set data_workers=0. If storage is slow, set a "
    "larger cluster.timeout."
)


@final
class DataWaitError(WorldsizeError):
    """The data of a step did not come in time."""


class StopBetweenSteps(BaseException):
    """All ranks stop before the step whose data they wait for."""


@final
@dataclass(frozen=True)
class Patience:
    """The limits of a wait for data.

    Attributes:
        seconds: The longest wait; None: there is no bound, and nobody watches.
        speaks: Whether this process logs a long wait; one is enough.
        stops: Returns whether all ranks stop before a step, given its number; it may wait for them.
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
    """The waits for data of the main thread, one after the other, each watched by another thread."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._closed = threading.Event()
        self._open: _Wait | None = None
        self._judging = threading.Lock()  # held by the other thread while it votes, and while it signals

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the waits within the context, which must be entered by the main thread to have an effect."""
        if self._patience.seconds is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(_WAKE, self._interrupt)
        threading.Thread(target=self._watch, name="data watch", daemon=True).start()
        try:
            yield
        finally:
            self._closed.set()
            self._open = None
            with self._judging:  # a later signal would end the process
                signal.signal(_WAKE, before)

    @contextmanager
    def during(self, step: int, describe: Callable[[], str], *, may_stop: bool = True) -> Iterator[None]:
        """Wait for the data of ``step`` within the context.

        Args:
            step: Number of the step.
            describe: Says in sentences who is waited for; another thread calls it.
            may_stop: Whether the run can be saved as it was before the step.

        Raises:
            DataWaitError: the data did not come in time.
            StopBetweenSteps: all ranks stop before the step.
            Exception: the ranks cannot agree whether they stop, for example since their store is gone.
        """
        wait = self._open = _Wait(step, describe, may_stop, time.monotonic())
        try:
            yield
        finally:
            self._open = None
        with self._judging:  # the data came during a vote: the others may stop because of this rank's vote
            if wait.error is not None and not isinstance(wait.error, DataWaitError):
                raise wait.error

    def _interrupt(self, *_: Any) -> None:
        wait = self._open
        if wait is not None and wait.error is not None:
            self._open = None  # it is raised once
            raise wait.error

    def _watch(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not self._closed.wait(_LOOK):
            wait = self._open
            if wait is not None and time.monotonic() - wait.begun >= _LOOK:
                self._judge(wait)
                with self._judging:
                    if wait.error is not None and self._open is wait:
                        signal.pthread_kill(main, _WAKE)

    def _judge(self, wait: _Wait) -> None:
        """Set the error of a wait that is to end, and log one that is long."""
        if wait.error is None and wait.may_stop:
            self._vote(wait)
        patience, waited = self._patience, time.monotonic() - wait.begun
        if wait.error is not None:
            return
        if patience.seconds is not None and waited > patience.seconds:
            wait.error = DataWaitError(f"{_text(wait, waited)}\n{_REMEDY}")
        elif patience.speaks and waited >= _WARNED and not wait.is_warned:
            wait.is_warned = True
            _logger.warning("%s", _text(wait, waited))

    def _vote(self, wait: _Wait) -> None:
        """Set the error of a wait that all ranks stop; it lasts at least as long as the vote."""
        with self._judging:
            try:
                if self._open is wait and self._patience.stops(wait.step):
                    wait.error = StopBetweenSteps()
            except Exception as error:  # of any store: the others may have counted this rank's vote
                wait.error = error


def _text(wait: _Wait, seconds: float) -> str:
    try:
        place = wait.describe()
    except Exception as error:  # of any kind: the loader is read while the main thread uses it
        place = f"Who loads them is not known: {error!r}."
    return f"step {wait.step} waits for its data since {seconds:.0f} s. {place}"


def own_place() -> str:
    """Describe where the main thread is, which loads the data itself."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = "".join(traceback.format_list(traceback.extract_stack(frame)[-_FRAMES:])) if frame else ""
    return f"This process loads them itself, and is here:\n{stack.rstrip()}"
