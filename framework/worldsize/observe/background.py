"""A listener that costs its caller only a queue."""

from __future__ import annotations

import sys
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import final

from worldsize.core import Event, Listener, RunEnded, RunFailed


@final
class InBackground:
    """Builds the real listener in a thread and tells it every event there, in order.

    So a slow start (wandb takes a second or two) does not delay the first step. A listener that fails is
    reported once and left alone: losing a logger must not lose the run. The end of the run waits at most
    ``timeout`` seconds for the rest to be told.
    """

    def __init__(self, make: Callable[[], Listener], *, timeout: float = 30.0) -> None:
        self._make = make
        self._timeout = timeout
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._thread = Thread(target=self._forward, name="listener", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._events.put(event)
        if isinstance(event, RunEnded | RunFailed):
            self._thread.join(self._timeout)
            if self._thread.is_alive():
                _warn(f"the logger did not finish within {self._timeout} s; what it has not sent yet is lost")

    def _forward(self) -> None:
        try:
            listener = self._make()
            while True:
                event = self._events.get()
                listener(event)
                if isinstance(event, RunEnded | RunFailed):
                    return
        except Exception as error:  # any: a third party's code, which must not end the training
            _warn(f"the logger failed and is off for the rest of the run: {type(error).__name__}: {error}")


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)
