"""Heartbeats of ranks: a few numbers in shared memory that the launching process can read after a rank's death."""

from __future__ import annotations

import mmap
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

_FORMAT = struct.Struct("=qqqd")


@dataclass(frozen=True)
class Beat:
    """The progress of a process.

    ``step`` is in progress (0: none yet), ``first`` is the step after which the process began, and ``done`` the last
    completed step. ``at`` is the Unix time in seconds at which it completed its first step (0.0: none).
    """

    step: int
    first: int
    done: int
    at: float


@final
class Heartbeat:
    """Records the progress of this process, in about 1 µs per step: writing to mapped memory needs no system call."""

    def __init__(self, path: Path, first: int) -> None:
        with path.open("w+b") as file:
            file.truncate(_FORMAT.size)
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)
        self._first, self._at = first, 0.0
        self.step(first)

    def step(self, done: int) -> None:
        """Record that steps up to ``done`` are complete and the next one begins."""
        if done > self._first and self._at == 0.0:
            self._at = time.time()
        _FORMAT.pack_into(self._memory, 0, done + 1, self._first, done, self._at)


def write_beat(path: Path, beat: Beat) -> None:
    """Write the record of a process on another host, for :func:`read_beat`."""
    with suppress(OSError):  # the folder has been removed
        path.write_bytes(_FORMAT.pack(beat.step, beat.first, beat.done, beat.at))


def read_beat(path: Path) -> Beat | None:
    """Return the last record of a process; None if it wrote none."""
    try:
        beat = Beat(*_FORMAT.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None
    return beat if beat.step else None
