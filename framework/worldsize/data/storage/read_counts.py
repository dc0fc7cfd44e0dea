"""Counts what this process reads of its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass
class ReadCounts:
    """Counts of what a process has read since it began.

    Attributes:
        read: bytes of samples and indices that were asked for.
        fetched: bytes that came from other machines.
        skipped: samples that could not be read, where ``on_error=skip``.
    """

    read: int = 0
    fetched: int = 0
    skipped: int = 0


COUNTS = ReadCounts()
