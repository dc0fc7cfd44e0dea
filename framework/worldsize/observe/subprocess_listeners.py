"""Listeners in processes of their own, so that they cost the training neither time nor the interpreter's lock."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from select import select
from typing import IO, BinaryIO, final

from worldsize.core import Event, Listener, RunEnded, RunFailed, StepDone
from worldsize.world.preemption import SIGNALS

_logger = logging.getLogger(__name__)

_NICENESS = 10  # ranks come first, but where they take every core a listener still starts within its time
_TURN = 60.0  # seconds that a listener waits for that of an attempt before it
_INTERVAL = 1.0  # seconds in which steps are told of once; what else happens is told at once, such as a checkpoint


@final
class SubprocessListeners:
    """Forks a process for each listener that builds it and tells it every event, in order.

    Make it before the process group and CUDA exist. In a thread wandb's start and its log calls cost a tiny
    model a third of its speed. A listener that cannot be made or fails is reported once and left alone, and one that is
    slow holds no other one up: losing a logger must not lose the run. If the training process dies, the listeners are
    told RunFailed.

    Args:
        makers: Make the listeners, by the name under which a warning speaks of each.
        timeout: Seconds that a run which has ended waits for the rest to be told.
        grace: Returns the seconds that a run which was asked to end, or failed, has until it is killed; it waits no
            longer than that.
        lock: Returns the file at which the listeners of that name take turns, which several attempts of a run may
            have: the one of an attempt that was killed goes on until it has told what happened before.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Listener]],
        *,
        timeout: float = 120.0,
        grace: Callable[[], float] = lambda: 30.0,
        lock: Callable[[str], Path] | None = None,
    ) -> None:
        self._timeout, self._grace = timeout, grace
        self._ended = False
        self._unsent = b""
        self._sent = -math.inf  # when something was sent
        self._processes: list[_ListenerProcess] = []
        for name, make in makers.items():
            place = lock(name) if lock else None
            self._processes.append(_ListenerProcess(name, make, self._processes, place))

    def __call__(self, event: Event) -> None:
        if self._ended:
            return  # a failure after the end: they have been told the end already
        self._unsent += pickle.dumps(event)
        if isinstance(event, StepDone) and time.monotonic() < self._sent + _INTERVAL:
            return  # each message wakes a process that then wants a core of those who train
        self._sent = time.monotonic()
        for process in self._processes:
            process.send(self._unsent)
        self._unsent = b""
        if isinstance(event, RunEnded | RunFailed):
            self._ended = True
            complete = isinstance(event, RunEnded) and event.exit_reason == "completed"
            seconds = self._timeout if complete else min(self._grace(), self._timeout)
            self._finish(seconds)

    def _finish(self, seconds: float) -> None:
        """Send each listener the rest as fast as it takes it, and wait for all until the time is over."""
        deadline = time.monotonic() + seconds
        behind = {process.sender: process for process in self._processes if process.is_behind}
        while behind and (left := deadline - time.monotonic()) > 0:
            for sender in select([], list(behind), [], left)[1]:
                behind[sender].send(b"")
                if not behind[sender].is_behind:
                    behind.pop(sender).close()
        for process in self._processes:
            process.close()
        for process in self._processes:
            if not process.has_ended(deadline):
                _logger.warning(
                    "the %s did not finish within %.3g s; what it has not sent yet is lost", process.name, seconds
                )


@final
class _ListenerProcess:
    """One listener's process, and the pipe that events go through; ``before``: those that were forked before it."""

    def __init__(
        self, name: str, make: Callable[[], Listener], before: Sequence[_ListenerProcess], lock: Path | None
    ) -> None:
        self.name = name
        receiver, self.sender = os.pipe()
        os.set_blocking(self.sender, False)
        self._unsent = bytearray()
        self._is_closed = False
        senders = [self.sender, *(each.sender for each in before)]
        self._process = get_context("fork").Process(
            target=_serve, args=(name, make, receiver, senders, lock), daemon=True
        )
        self._process.start()
        os.close(receiver)

    def send(self, message: bytes) -> None:
        """Send as much of what has not been sent as the pipe takes now."""
        self._unsent += message
        try:
            while self._unsent:
                del self._unsent[: os.write(self.sender, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()  # it has said why, and ended

    @property
    def is_behind(self) -> bool:
        """Whether something has not been sent yet."""
        return bool(self._unsent)

    def close(self) -> None:
        """Close the pipe, so that the process sees the end of the events."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self.sender)

    def has_ended(self, deadline: float) -> bool:
        """Wait for the process until ``deadline``; kill it then and return False."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        if not self._process.is_alive():
            return True
        self._process.kill()
        return False


def _serve(name: str, make: Callable[[], Listener], receiver: int, senders: Sequence[int], lock: Path | None) -> None:
    """Pass events to the listener, in the forked process."""
    for sender in senders:
        os.close(sender)  # or the end of the training process would not be seen
    os.nice(_NICENESS)  # what it starts inherits that
    for number in SIGNALS:  # what they ask of the run, the training process says
        signal.signal(number, signal.SIG_IGN)
    try:
        with open(receiver, "rb") as events, _turn(lock):
            listener = make()
            while not isinstance(event := _next(events), RunEnded | RunFailed):
                listener(event)
            listener(event)
    except Exception as error:  # any: a third party's code, which must not end the training
        _logger.warning("the %s failed and is off for the rest of the run: %s: %s", name, type(error).__name__, error)


def _turn(lock: Path | None) -> AbstractContextManager[object]:
    """Wait for ``lock``, but not for ever, and return what holds it; nothing does where a file system has no locks."""
    if lock is None:
        return nullcontext()
    deadline = time.monotonic() + _TURN
    try:
        file = lock.open("a")
        while not _locked(file) and time.monotonic() < deadline:
            time.sleep(0.05)
    except OSError:
        return nullcontext()
    return file


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # which no process inherits that the listener starts
    except (BlockingIOError, PermissionError):
        return False
    return True


def _next(events: BinaryIO) -> Event:
    try:
        event: Event = pickle.load(events)
        return event
    except (EOFError, pickle.UnpicklingError):  # the latter: killed in the middle of an event
        return RunFailed("the training process ended without a word")
