"""A listener in a process of its own, so that it costs the training neither time nor the interpreter's lock."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import final

from worldsize.core import Event, Listener, RunEnded, RunFailed


@final
class Aside:
    """Forks a process that builds the real listener and tells it every event, in order.

    Make it before the process group and CUDA exist. In a thread wandb's start and its log calls cost a tiny
    model a third of its speed. A listener that fails is reported once and left alone: losing a logger must
    not lose the run. The end of the run waits at most ``timeout`` seconds for the rest to be told; if the
    training process dies, the listener is told RunFailed.
    """

    def __init__(self, make: Callable[[], Listener], *, timeout: float = 30.0) -> None:
        context = get_context("fork")
        receiver, self._sender = context.Pipe(duplex=False)
        self._timeout = timeout
        self._process = context.Process(target=_serve, args=(make, receiver, self._sender), daemon=True)
        self._process.start()
        receiver.close()

    def __call__(self, event: Event) -> None:
        try:
            self._sender.send(event)
        except BrokenPipeError:
            return  # it has said why, and ended
        if isinstance(event, RunEnded | RunFailed):
            self._sender.close()
            self._process.join(self._timeout)
            if self._process.is_alive():
                _warn(f"the logger did not finish within {self._timeout} s; what it has not sent yet is lost")


def _serve(make: Callable[[], Listener], receiver: Connection, sender: Connection) -> None:
    """In the forked process."""
    sender.close()  # or the end of the training process would not be seen
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        listener = make()
        while not isinstance(event := _next(receiver), RunEnded | RunFailed):
            listener(event)
        listener(event)
    except Exception as error:  # any: a third party's code, which must not end the training
        _warn(f"the logger failed and is off for the rest of the run: {type(error).__name__}: {error}")


def _next(receiver: Connection) -> Event:
    try:
        event: Event = receiver.recv()
        return event
    except EOFError:
        return RunFailed("the training process ended without a word")


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
