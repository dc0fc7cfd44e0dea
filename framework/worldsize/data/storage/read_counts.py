"""Counts what this process reads of its data, and what its data workers read for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass
class ReadCounts:
    """Counts of what was read.

    Attributes:
        read: bytes of samples and indices that were asked for.
        fetched: bytes that came from other machines.
        skipped: samples that could not be read, where ``on_error=skip``.
    """

    read: int = 0
    fetched: int = 0
    skipped: int = 0

    def add(self, read: int, fetched: int, skipped: int) -> None:
        """Add what another process has counted."""
        self.read += read
        self.fetched += fetched
        self.skipped += skipped

    def reset(self) -> None:
        """Begin anew at zero, as a process does that has inherited the counts of another."""
        self.read = self.fetched = self.skipped = 0

    def since(self, before: ReadCounts) -> ReadCounts:
        """Return the counts from ``before`` until now."""
        return ReadCounts(self.read - before.read, self.fetched - before.fetched, self.skipped - before.skipped)

    def copy(self) -> ReadCounts:
        """Return the counts as they are now."""
        return ReadCounts(self.read, self.fetched, self.skipped)

    def taken(self) -> tuple[int, int, int]:
        """Return the three counts, for :meth:`add`, and begin anew at zero."""
        counts = self.read, self.fetched, self.skipped
        self.reset()
        return counts


COUNTS = ReadCounts()
"""Counts of this process and its data workers since it began."""
