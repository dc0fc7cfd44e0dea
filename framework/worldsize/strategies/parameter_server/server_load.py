"""The load of a server since the last query."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, final


@final
@dataclass
class ServerLoad:
    """Counts pushes and pulls and their bytes.

    Attributes:
        waiting: Number of pushes that now wait for the shard.
        longest_queue: Largest number of pushes that waited at once.
        since: Start of the counts, in seconds of ``time.perf_counter``.
    """

    pushes: int = 0
    pulls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    waiting: int = 0
    longest_queue: int = 0
    since: float = field(default_factory=time.perf_counter)

    def queue(self, change: int) -> None:
        """Count a push that begins (1) or ends (-1) to wait."""
        self.waiting += change
        self.longest_queue = max(self.longest_queue, self.waiting)

    def count_push(self, nbytes: int) -> None:
        self.pushes += 1
        self.bytes_in += nbytes

    def count_pull(self, nbytes: int) -> None:
        self.pulls += 1
        self.bytes_out += nbytes

    def facts(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        return {
            "pushes": self.pushes,
            "pulls": self.pulls,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "longest_queue": self.longest_queue,
            "seconds": round(time.perf_counter() - self.since, 3),
        }
