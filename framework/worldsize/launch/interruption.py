"""Wakes a launching process that waits for its gang, on signals or calls from another thread."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Self, final

from worldsize.world.preemption import SIGNALS, handled, note


@final
class Signals:
    """Collects signals that request an end, in order, while the launching process waits.

    They are recorded, not raised, so that none is lost if two arrive together. Each makes ``arrival`` readable, even if
    the kernel delivers it to another thread, which would not wake the main thread.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.arrival, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers: dict[int, Any] = {}  # previous handlers
        self._mask: set[int] = set()

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, self._note) for number in handled(SIGNALS)}
        signal.set_wakeup_fd(self._write)
        self._mask = set(signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS))
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        os.close(self.arrival)
        os.close(self._write)

    def drain(self) -> None:
        """Clear ``arrival`` until the next signal."""
        os.read(self.arrival, 1024)

    def _note(self, number: int, _: FrameType | None) -> None:
        note(self.seen, number)


@final
class Abort:
    """Lets another thread request at any time to kill all processes; ``arrival`` becomes readable.

    The request is permanent, so that one made before anybody waits is not lost.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.arrival, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_closed = False
        self._lock = threading.Lock()  # a closed descriptor may have been reused for another file

    def request(self) -> None:
        with self._lock:
            self.is_requested = True
            if not self._is_closed:
                os.write(self._write, b"!")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.arrival)
            os.close(self._write)
