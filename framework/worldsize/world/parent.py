"""Ties the life of a process to that of its parent, so that no orphan is left behind, and names it by its rank."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
from contextlib import suppress
from pathlib import Path

RANK_NAME = re.compile(r"rank (\d+)", re.ASCII)  # what a process of a run is called by the kernel
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, however that happens (prctl(2), Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the request took effect
        os._exit(1)


def name_process(rank: int) -> None:
    """Call this process "rank 3" where the kernel lists it (top, ps, /proc/PID/comm), and what it forks, too."""
    with suppress(OSError):  # not on Linux
        Path("/proc/self/comm").write_text(f"rank {rank}")
