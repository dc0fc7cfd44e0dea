"""Count lines of programs and of their ports, the same way for recipes and for adapters."""

from __future__ import annotations


def count_lines(text: str) -> int:
    """Return the number of non-empty lines of ``text``."""
    return sum(1 for line in text.splitlines() if line.strip())
