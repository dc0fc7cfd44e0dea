"""Goodput: the fraction of a run's time spent on useful steps (Google, "ML Productivity Goodput", 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


def goodput(attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the total and useful seconds of a manifest's attempts, and the cost of each restart.

    Useful time is from the first step of an attempt to its end, without steps that were repeated later. A restart costs
    the steps that it lost, and the seconds from the end of one attempt to the first completed step of the next.
    """
    known = [each for each in attempts if each["steps"] and each["first_step_at"]]
    total = attempts[-1]["end_at"] - attempts[0]["start_at"]
    kept = [later["steps"][0] for later in known[1:]] + [each["steps"][1] for each in known[-1:]]
    useful = sum(_useful(each, upto) for each, upto in zip(known, kept, strict=True))
    return {
        "total_seconds": total,
        "useful_seconds": useful,
        "fraction": useful / total if total else 0.0,
        "lost_steps": [earlier["steps"][1] - later["steps"][0] for earlier, later in pairwise(known)],
        "recover_seconds": [later["first_step_at"] - earlier["end_at"] for earlier, later in pairwise(known)],
    }


def _useful(attempt: Mapping[str, Any], upto: int) -> float:
    """Return the seconds of ``attempt`` spent on steps up to ``upto``."""
    first, last = attempt["steps"]
    seconds: float = attempt["end_at"] - attempt["first_step_at"]
    return seconds * (upto - first) / (last - first) if last > first else 0.0
