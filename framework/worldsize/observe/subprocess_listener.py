"""A listener in a process of its own, so that it costs the training neither time nor the interpreter's lock."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from select import select
from typing import BinaryIO, final

from worldsize.core import Event, Listener, RunEnded, RunFailed
from worldsize.world.preemption import SIGNALS

_logger = logging.getLogger(__name__)

_NICENESS = 10  # ranks come first, but where they take every core a listener still starts within its time
_HURRIED = 30.0  # seconds, where others wait for the end: a scheduler that has asked for it, or what failed


@final
class SubprocessListener:
    """Forks a process that builds the real listener and tells it every event, in order.

    Make it before the process group and CUDA exist. In a thread wandb's start and its log calls cost a tiny
    model a third of its speed. A listener that fails is reported once and left alone: losing a logger must
    not lose the run. A run that is complete waits at most ``timeout`` seconds for the rest to be told, another at
    most 30; if the training process dies, the listener is told RunFailed.
    """

    def __init__(self, make: Callable[[], Listener], *, timeout: float = 120.0) -> None:
        receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        self._timeout = timeout
        self._unsent = bytearray()
        self._ended = False
        ends = (receiver, self._sender)
        self._process = get_context("fork").Process(target=_serve, args=(make, *ends), daemon=True)
        self._process.start()
        os.close(receiver)

    def __call__(self, event: Event) -> None:
        if self._ended:
            return  # a failure after the end: it has been told the end already
        self._unsent += pickle.dumps(event)
        self._send()
        if isinstance(event, RunEnded | RunFailed):
            self._ended = True
            complete = isinstance(event, RunEnded) and event.exit_reason == "completed"
            self._finish(self._timeout if complete else min(_HURRIED, self._timeout))

    def _send(self) -> None:
        """Send as much as the pipe takes now."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._sender, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent.clear()  # it has said why, and ended

    def _finish(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            select([], [self._sender], [], left)
            self._send()
        os.close(self._sender)
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            _logger.warning("the logger did not finish within %s s; what it has not sent yet is lost", seconds)


def _serve(make: Callable[[], Listener], receiver: int, sender: int) -> None:
    """Pass events to the listener, in the forked process."""
    os.close(sender)  # or the end of the training process would not be seen
    os.nice(_NICENESS)  # what it starts inherits that
    for number in SIGNALS:  # what they ask of the run, the training process says
        signal.signal(number, signal.SIG_IGN)
    try:
        with open(receiver, "rb") as events:
            listener = make()
            while not isinstance(event := _next(events), RunEnded | RunFailed):
                listener(event)
            listener(event)
    except Exception as error:  # any: a third party's code, which must not end the training
        _logger.warning("the logger failed and is off for the rest of the run: %s: %s", type(error).__name__, error)


def _next(events: BinaryIO) -> Event:
    try:
        event: Event = pickle.load(events)
        return event
    except (EOFError, pickle.UnpicklingError):  # the latter: killed in the middle of an event
        return RunFailed("the training process ended without a word")
