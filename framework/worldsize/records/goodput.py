"""Goodput: how much of a run's time went into steps that count (Google, "ML Productivity Goodput", 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


def goodput(attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Account for the time of a manifest's attempts: seconds in all and useful, and what each restart cost.

    Useful is the time between the first step and the end of an attempt, less the part of its steps that were done
    again. A restart costs the steps that it lost, and seconds to recover: from the end of one attempt to the first
    completed step of the next.
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
    """Seconds of ``attempt`` that went into steps up to ``upto``."""
    first, last = attempt["steps"]
    seconds: float = attempt["end_at"] - attempt["first_step_at"]
    return seconds * (upto - first) / (last - first) if last > first else 0.0
