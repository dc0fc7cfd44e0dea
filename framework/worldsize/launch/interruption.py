"""Wakes a launching process that waits for its gang: on signals, on calls, when its run folder is deleted."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Self, final

from worldsize.record.run_directory import is_missing
from worldsize.world.processes import SIGNALS, handled, note


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


@final
class FolderWatch:
    """Checks about once a second whether the run's manifest exists.

    The folder counts as deleted if the manifest is missing twice in a row, since on some mounted buckets a file is
    missing for a moment while it is replaced. A run without a manifest from the start, such as an examination, is not
    checked.
    """

    interval: ClassVar[float] = 1.0  # seconds between two checks

    def __init__(self, manifest: Path) -> None:
        self._manifest, self._is_expected = manifest, manifest.exists()
        self._next = time.monotonic() + self.interval
        self._misses = 0

    @property
    def is_deleted(self) -> bool:
        return self._misses > 1

    def look(self) -> bool:
        """Return whether the folder was deleted; check at most once a second."""
        if self._is_expected and time.monotonic() >= self._next and not self.is_deleted:
            self._next = time.monotonic() + self.interval
            self._misses = self._misses + 1 if is_missing(self._manifest) else 0
        return self.is_deleted
