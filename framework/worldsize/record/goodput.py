"""Goodput: the fraction of a run's time spent on useful steps (Google, "ML Productivity Goodput", 2024)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypedDict

from worldsize.record.attempt import Attempt


class Goodput(TypedDict):
    """The times of a run; ``lost_steps`` and ``recover_seconds`` have a value for each restart."""

    total_seconds: float
    useful_seconds: float
    fraction: float
    lost_steps: list[int]
    recover_seconds: list[float]


class _Trained(NamedTuple):
    """The steps ``first`` to ``last`` of an attempt that has done some and ended, and its times in Unix seconds."""

    first: int
    last: int
    first_step_at: float
    end_at: float


def goodput(attempts: Sequence[Attempt]) -> Goodput:
    """Return the total and useful seconds of a manifest's attempts, and the cost of each restart.

    Useful time is from the first step of an attempt to its end, without steps that were repeated later. A restart costs
    the steps that it lost, and the seconds from the end of one attempt to the first completed step of the next. While a
    gang that heals changes its members, no time is useful. The clocks of two attempts may differ: no duration is
    negative.

    Args:
        attempts: One attempt or more, the last of which has ended.
    """
    trained = list(_trained(attempts))
    total = sum(map(_seconds, attempts)) + sum(_between(earlier, later) for earlier, later in pairwise(attempts))
    kept = [later.first for later in trained[1:]] + [each.last for each in trained[-1:]]
    useful = sum(_useful(each, upto) for each, upto in zip(trained, kept, strict=True))
    useful = min(max(useful - sum(map(_paused, attempts)), 0.0), total)
    return {
        "total_seconds": total,
        "useful_seconds": useful,
        "fraction": useful / total if total else 0.0,
        "lost_steps": [max(earlier.last - later.first, 0) for earlier, later in pairwise(trained)],
        "recover_seconds": [max(later.first_step_at - earlier.end_at, 0.0) for earlier, later in pairwise(trained)],
    }


def _seconds(attempt: Attempt) -> float:
    return max((attempt["end_at"] or 0.0) - attempt["start_at"], 0.0)


def _between(earlier: Attempt, later: Attempt) -> float:
    return max(later["start_at"] - (earlier["end_at"] or later["start_at"]), 0.0)


def _trained(attempts: Sequence[Attempt]) -> Iterator[_Trained]:
    for each in attempts:
        if each["steps"] and each["first_step_at"] and each["end_at"] is not None:
            first, last = each["steps"]
            yield _Trained(first, last, max(each["first_step_at"], each["start_at"]), each["end_at"])


def _useful(attempt: _Trained, upto: int) -> float:
    """Return the seconds of ``attempt`` spent on steps up to ``upto``."""
    seconds, steps = attempt.end_at - attempt.first_step_at, attempt.last - attempt.first
    done = min(max(upto - attempt.first, 0), steps)
    return max(seconds, 0.0) * done / steps if steps > 0 else 0.0


def _paused(attempt: Attempt) -> float:
    """Return the seconds in which the members of a gang changed, and nobody trained."""
    seconds, since = 0.0, None
    for each in attempt.get("memberships", ())[1:]:
        since = each["ended"] if since is None else since
        if each["began"] is not None:
            seconds, since = seconds + max(each["began"] - since, 0.0), None
    return min(seconds, _seconds(attempt))
