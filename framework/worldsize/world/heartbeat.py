"""Heartbeats of ranks: a few numbers in memory that the launching process can read after the rank's death."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

_FORMAT = struct.Struct("=qqqd")


@dataclass(frozen=True)
class Beat:
    """``step`` is the one in progress (0: none yet), ``first`` the one that the process began after.

    ``done`` is the last completed step, ``at`` the Unix time at which the first one was completed (0.0: none).
    """

    step: int
    first: int
    done: int
    at: float


@final
class Heartbeat:
    """Told at each step, for about a microsecond: a shared mapping needs no call to the kernel."""

    def __init__(self, path: Path, first: int) -> None:
        with path.open("w+b") as file:
            file.truncate(_FORMAT.size)
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)
        self._first, self._at = first, 0.0
        self.step(first)

    def step(self, done: int) -> None:
        """Steps up to ``done`` are behind; the next one begins."""
        if done > self._first and self._at == 0.0:
            self._at = time.time()
        _FORMAT.pack_into(self._memory, 0, done + 1, self._first, done, self._at)


def read_beat(path: Path) -> Beat | None:
    """Return what a process last told; None if it did not get so far."""
    try:
        beat = Beat(*_FORMAT.unpack(path.read_bytes()))
    except (OSError, struct.error):
        return None
    return beat if beat.step else None
