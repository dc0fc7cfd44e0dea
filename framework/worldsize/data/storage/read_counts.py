"""Counts what this process reads of its data, and what its data workers read for it."""

from __future__ import annotations

from dataclasses import astuple, dataclass
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

    def add(self, other: ReadCounts) -> None:
        """Add what another process has counted."""
        self.read += other.read
        self.fetched += other.fetched
        self.skipped += other.skipped

    def reset(self) -> None:
        """Begin anew at zero, as a process does that has inherited the counts of another."""
        self.read = self.fetched = self.skipped = 0

    def since(self, before: ReadCounts) -> ReadCounts:
        """Return the counts from ``before`` until now."""
        return ReadCounts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def copy(self) -> ReadCounts:
        """Return the counts as they are now."""
        return ReadCounts(self.read, self.fetched, self.skipped)


COUNTS = ReadCounts()
"""Counts of this process and its data workers since it began."""
