"""Runs listeners in separate processes, so that they do not use training's time or GIL."""

from __future__ import annotations

import fcntl
import logging
import math
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from select import select
from typing import IO, BinaryIO, final

from worldsize.core import Event, Listener, RunEnded, RunFailed, StepDone
from worldsize.world.processes import SIGNALS

Alerts = Callable[[], Iterable[Event]]
_logger = logging.getLogger(__name__)

_NICENESS = 10  # lower priority than ranks, but a listener must still start in time if ranks use all cores
_TURN = 60.0  # maximum seconds to wait for the listener of the previous attempt
_INTERVAL = 1.0  # seconds between batches of step events; other events, such as a checkpoint, are sent at once
_QUEUED = 64 << 20  # maximum bytes queued for a listener; above this, further steps are dropped


@final
class SubprocessListeners:
    """Forks a process per listener, which creates the listener and receives all events in order.

    Create it before process groups and CUDA are initialized. (In a thread, wandb's start and log calls cost a tiny
    model a third of its speed.) A failing listener is reported once and then ignored, and a slow one does not delay
    others: losing a logger must not end the run. A listener that falls behind by 64 MiB, e.g. while its server is down,
    misses steps until it has caught up. If the training process dies, listeners receive RunFailed.

    Args:
        makers: Functions that create the listeners, by the name used in warnings.
        timeout: Seconds that a finished run waits for the remaining events to be delivered.
        grace: Returns the seconds until a failed or ending run is killed; listeners get no more in that case.
        lock: Returns a lock file per listener name, shared by all attempts of a run: the listener of a killed attempt
            continues until it has delivered its events.
        alerts: Returns node alerts since its last call, in the listeners' processes. Listeners receive them between
            other events.
    """

    def __init__(
        self,
        makers: Mapping[str, Callable[[], Listener]],
        *,
        timeout: float = 120.0,
        grace: Callable[[], float] = lambda: 30.0,
        lock: Callable[[str], Path] | None = None,
        alerts: Alerts = tuple,
    ) -> None:
        self._timeout, self._grace = timeout, grace
        self._ended = False
        self._steps = b""  # step events not sent yet
        self._sent = -math.inf  # time of the last message
        self._processes: list[_ListenerProcess] = []
        for name, make in makers.items():
            place = lock(name) if lock else None
            self._processes.append(_ListenerProcess(name, make, self._processes, place, alerts))

    def __call__(self, event: Event) -> None:
        if self._ended:
            return  # listeners have already received the end of the run
        message = pickle.dumps(event)
        if isinstance(event, StepDone):
            self._steps, message = self._steps + message, b""
            if time.monotonic() < self._sent + _INTERVAL:
                return  # do not send each step, since each message wakes a process that competes for cores
        self._sent = time.monotonic()
        for process in self._processes:
            process.send(message, steps=self._steps)
        self._steps = b""
        if isinstance(event, RunEnded | RunFailed):
            self._ended = True
            complete = isinstance(event, RunEnded) and event.exit_reason == "completed"
            seconds = self._timeout if complete else min(self._grace(), self._timeout)
            self._finish_listeners(seconds)

    def _finish_listeners(self, seconds: float) -> None:
        """Send the remaining events to all listeners, and wait for them for at most ``seconds``."""
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
                    "the %s did not finish within %.3g s: its unsent events are lost", process.name, seconds
                )


@final
class _ListenerProcess:
    """A listener's process and its pipe for events.

    ``before``: processes started earlier; the new process closes their pipes.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Listener],
        before: Sequence[_ListenerProcess],
        lock: Path | None,
        alerts: Alerts,
    ) -> None:
        self.name = name
        receiver, self.sender = os.pipe()
        os.set_blocking(self.sender, False)
        self._unsent = bytearray()
        self._is_closed = self._misses_steps = False
        senders = [self.sender, *(each.sender for each in before)]
        self._process = get_context("fork").Process(
            target=_run_listener, args=(name, make, receiver, senders, lock, alerts), daemon=True
        )
        self._process.start()
        os.close(receiver)

    def send(self, message: bytes, *, steps: bytes = b"") -> None:
        """Queue ``message``, and ``steps`` if there is room; send as much as the pipe accepts."""
        if steps and len(self._unsent) > _QUEUED:
            if not self._misses_steps:
                _logger.warning("the %s is falling behind and skips steps until it catches up", self.name)
            self._misses_steps, steps = True, b""
        self._unsent += steps + message
        try:
            while self._unsent:
                del self._unsent[: os.write(self.sender, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()  # the listener has reported its error and exited

    @property
    def is_behind(self) -> bool:
        """Whether some events have not been written to the pipe yet."""
        return bool(self._unsent)

    def close(self) -> None:
        """Close the pipe, which signals the end of events to the process."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self.sender)

    def has_ended(self, deadline: float) -> bool:
        """Return whether the process ends by ``deadline`` (monotonic seconds); if not, kill it."""
        self._process.join(max(0.0, deadline - time.monotonic()))
        if not self._process.is_alive():
            return True
        self._process.kill()
        return False


def _run_listener(
    name: str,
    make: Callable[[], Listener],
    receiver: int,
    senders: Sequence[int],
    lock: Path | None,
    alerts: Alerts,
) -> None:
    """Create the listener in this forked process, and pass events to it until the run ends."""
    for sender in senders:
        os.close(sender)  # otherwise the exit of the training process would go unnoticed
    os.nice(_NICENESS)  # inherited by its child processes
    for number in SIGNALS:  # the training process handles signals for the run
        signal.signal(number, signal.SIG_IGN)
    try:
        with open(receiver, "rb") as events, _wait_for_lock(lock):
            listener = make()
            event: Event | None = None
            while not isinstance(event, RunEnded | RunFailed):
                event = _read_event(events)
                for each in (*alerts(), event):
                    listener(each)
    except Exception as error:  # of any type: third-party code must not end training
        _logger.warning(
            "the %s failed and is disabled for the rest of the run: %s: %s", name, type(error).__name__, error
        )


def wait_for_listeners(folder: Path) -> None:
    """Wait a limited time until the listeners whose lock files are in ``folder`` have ended."""
    for lock in folder.glob("*.lock"):
        with _wait_for_lock(lock):
            pass


def _wait_for_lock(lock: Path | None) -> AbstractContextManager[object]:
    """Wait a limited time for ``lock``; return its file, unlocked if locks are unsupported."""
    if lock is None:
        return nullcontext()
    deadline = time.monotonic() + _TURN
    try:
        file = lock.open("a")
        while not _try_lock(file) and time.monotonic() < deadline:
            time.sleep(0.05)
    except OSError:
        return nullcontext()
    return file


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by the listener's child processes
    except (BlockingIOError, PermissionError):
        return False
    return True


def _read_event(events: BinaryIO) -> Event:
    try:
        event: Event = pickle.load(events)
        return event
    except (EOFError, pickle.UnpicklingError):  # EOFError: the training process was killed while sending an event
        return RunFailed("the training process ended unexpectedly")
