"""Wakes a launching process on signals, abort requests and a deleted run folder."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Self, final

from worldsize.record.run_directory import is_missing
from worldsize.world.processes import SIGNALS, filter_signals


@final
class Signals:
    """Records termination signals in order while the launching process waits.

    Signals are recorded instead of raised as exceptions, so that none is lost if two arrive together. Each makes
    ``arrival`` readable, even if the kernel delivers it to a thread other than the main thread. A signal repeated
    within ``repeats`` seconds counts once, since ``timeout`` and some schedulers send it to a process and to its group.
    SIGHUP combined with any other signal counts once, since a shutdown may send both.
    """

    repeats: ClassVar[float] = 0.25  # seconds; a user takes longer to press Ctrl-C twice

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._last: dict[int, float] = {}  # monotonic time of each signal's last arrival
        self.arrival, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers: dict[int, Any] = {}  # previous handlers
        self._mask: set[int] = set()

    def __enter__(self) -> Self:
        self._handlers = {number: signal.signal(number, self._record_signal) for number in filter_signals(SIGNALS)}
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

    def drain_arrival(self) -> None:
        """Drain ``arrival``, so that it is unreadable until the next signal."""
        os.read(self.arrival, 1024)

    def _record_signal(self, number: int, _: FrameType | None) -> None:
        last, self._last[number] = self._last.get(number, -math.inf), time.monotonic()
        if self._last[number] - last <= self.repeats:
            return
        if self.seen == [signal.SIGHUP]:
            self.seen[:] = [number]
        elif number != signal.SIGHUP or not self.seen:
            self.seen.append(number)


@final
class Abort:
    """A request, from any thread, to kill all processes; makes ``arrival`` readable.

    The request persists, so that it is not lost if made before the wait starts.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self.arrival, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._is_closed = False
        self._lock = threading.Lock()  # avoids writing to a closed descriptor, which may have been reused

    def request_abort(self) -> None:
        with self._lock:
            self.is_requested = True
            if not self._is_closed:
                os.write(self._write, b"!")

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            os.close(self.arrival)
            os.close(self._write)


@final
class FolderWatch:
    """Detects the deletion of a run's folder by looking for its manifest every second.

    The folder counts as deleted if the manifest is missing twice in a row, since on some mounted buckets a file
    disappears briefly while it is replaced. Runs without a manifest, such as an examination, are not checked.
    """

    interval: ClassVar[float] = 1.0  # seconds between two checks

    def __init__(self, manifest: Path) -> None:
        self._manifest, self._is_expected = manifest, manifest.exists()
        self._next = time.monotonic() + self.interval
        self._misses = 0

    @property
    def is_deleted(self) -> bool:
        return self._misses > 1

    def is_folder_deleted(self) -> bool:
        """Return whether the folder was deleted; it is checked at most once a second."""
        if self._is_expected and time.monotonic() >= self._next and not self.is_deleted:
            self._next = time.monotonic() + self.interval
            self._misses = self._misses + 1 if is_missing(self._manifest) else 0
        return self.is_deleted
