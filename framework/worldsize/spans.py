"""Names ranks for people. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def named(ranks: Sequence[int]) -> str:
    """Name ranks for people: "rank 5", "ranks 0-4, 6-63"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def spans(ranks: Sequence[int]) -> str:
    """Abbreviate ranks: "0-3, 8", or "0, 8 .. 56" at equal distances."""
    ordered = sorted(ranks)
    distances = {after - before for before, after in pairwise(ordered)}
    if len(ordered) > 3 and len(distances) == 1 and distances != {1}:
        return f"{ordered[0]}, {ordered[1]} .. {ordered[-1]}"
    texts, first = [], 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place] != ordered[place - 1] + 1:
            start, end = ordered[first], ordered[place - 1]
            texts.append(f"{start}" if start == end else f"{start}-{end}")
            first = place
    return ", ".join(texts)
