"""Signals and calls of another thread, which wake a launching process that waits for its gang."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Self, final

from worldsize.world.preemption import SIGNALS


@final
class Signals:
    """The signals that asked for an end, in their order, while the launching process waits.

    They are noted, not raised: of two that come together neither is lost. Each makes ``arrival`` readable, also one
    that the kernel hands to another thread, which would not wake the main thread.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.arrival, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers: dict[int, Any] = {}  # that were there before
        self._mask: set[int] = set()

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
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
        """Make ``arrival`` wait for the next signal."""
        os.read(self.arrival, 1024)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.seen.append(number)


@final
class Abort:
    """A request to end all processes at once, which another thread may make at any time; it makes ``arrival`` readable.

    The request stands for good, so that one made before anybody waits is not lost.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.arrival, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_closed = False
        self._lock = (
            threading.Lock()
        )  # nothing may be written to a descriptor that was closed and given to another file

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
