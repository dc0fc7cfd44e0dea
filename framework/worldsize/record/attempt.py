"""Attempts of a run, as recorded in its manifest, and their combined goodput.

Goodput is the fraction of a run's time spent on useful steps (Google, "ML Productivity Goodput", 2024).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

from worldsize.core.launcher import Failure, MembershipRecord
from worldsize.files import open_regular
from worldsize.messages import last_error, printable
from worldsize.record.redaction import remove_credentials
from worldsize.world.environments import read_job

LAUNCHER = "launcher"  # role of the launching process
FAILURE = "failure"  # name of the event for a failed attempt
_LONGEST_CAUSE = 1000  # maximum characters


class FailureRecord(TypedDict):
    """The first process that failed in an attempt, and the cause.

    Attributes:
        role: Role of the process; "node" for a whole host, "launcher" for the launching process.
        rank: Rank within the role, or index of the node.
        host: Host name; empty if unknown.
        step: Step that was being computed; None if unknown.
        cause: One-line error message.
    """

    role: str
    rank: int
    host: str
    step: int | None
    cause: str


class Attempt(TypedDict):
    """One attempt to train a run, from the start to the exit of its processes.

    Attributes:
        number: Number of the attempt, from 1.
        start: Start time (ISO 8601, UTC).
        start_at: Start time in Unix seconds.
        end: End time (ISO 8601, UTC); None while running.
        end_at: End time in Unix seconds; None while running.
        steps: Completed steps at the start and at the end; None if unknown.
        first_step_at: End of the first step in Unix seconds; None if no step was completed.
        exit_reason: "running", or the reason why the attempt ended.
        exit_code: Exit code of the run; None if it is running or was killed.
        hosts: Participating hosts, the launching host first.
        world_size: Number of processes.
        pid: Process ID of the launching process.
        job: Scheduler job of the attempt.
        pinning: Cores and memory of each process on the launching host, or why they are not pinned.
        transport: Transports used by collectives; for a healing gang, in its last membership.
        memberships: Successive members of a healing gang, with the first step of each membership.
        lost_metrics: Number of logged steps of earlier attempts missing from ``metrics.jsonl`` at the start.
        lost_host: First host of the attempt, if it was lost and the next attempt started without it.
        failure: The failure, if the attempt failed.
    """

    number: int
    start: str
    start_at: float
    end: str | None
    end_at: float | None
    steps: Sequence[int] | None
    first_step_at: float | None
    exit_reason: str
    exit_code: int | None
    hosts: list[str]
    world_size: int
    pid: int
    job: NotRequired[Any]
    pinning: NotRequired[Any]
    transport: NotRequired[Any]
    memberships: NotRequired[Sequence[MembershipRecord]]
    lost_metrics: NotRequired[int]
    lost_host: NotRequired[str]
    failure: NotRequired[FailureRecord]


def new_attempt(number: int, others: Sequence[str], world_size: int) -> Attempt:
    """Return the record of a new attempt that this process starts on this host and ``others``."""
    now = time.time()
    attempt: Attempt = {
        "number": number,
        "start": format_time(now),
        "start_at": now,
        "end": None,
        "end_at": None,
        "steps": None,
        "first_step_at": None,
        "exit_reason": "running",
        "exit_code": None,
        "hosts": [socket.gethostname(), *others],
        "world_size": world_size,
        "pid": os.getpid(),
    }
    if job := read_job(os.environ):
        attempt["job"] = job
    return attempt


def create_failure_record(failure: Failure) -> FailureRecord:
    """Convert a failure for the record; shorten tracebacks, and remove credentials from URLs."""
    cause = remove_credentials(last_error(failure.cause))[:_LONGEST_CAUSE]
    return {"role": failure.role, "rank": failure.rank, "host": failure.host, "step": failure.step, "cause": cause}


def failure_of_launcher(cause: str, host: str | None = None) -> FailureRecord:
    """Return a failure of the launching process, on ``host`` or by default on this host."""
    return create_failure_record(Failure(LAUNCHER, 0, cause, 1, host=host or socket.gethostname()))


def last_failure(attempts: Sequence[Attempt]) -> str | None:
    """Describe the failure of the last attempt in one line; return None if it did not fail."""
    failure = attempts[-1].get("failure") if attempts else None
    return failure_text(failure) if failure else None


def failure_text(failure: Mapping[str, object]) -> str:
    """Format a FailureRecord in one line: process, host, step and cause."""
    where = f" on {host}" if (host := failure.get("host")) else ""
    step = f" at step {step}" if (step := failure.get("step")) else ""
    role = failure.get("role")
    who = "the launching process" if role == LAUNCHER else f"{role} {failure.get('rank')}"
    return printable(f"{who}{where} failed{step}: {failure.get('cause')}")


def note_failure(events: Path, attempt: Attempt) -> None:
    """Append the attempt's failure, if any, to ``events.jsonl``; ignore write errors."""
    if failure := attempt.get("failure"):
        row = {"event": FAILURE, "time": attempt["end_at"], "attempt": attempt["number"], **failure}
        with suppress(OSError), open_regular(events, append=True) as file:
            file.write(f"{json.dumps(row)}\n".encode())


def compute_end_times(attempt: Attempt | None, *, begun: float) -> dict[str, Any]:
    """Return the end times of an attempt that ends now.

    They are computed from the start time and the monotonic clock (``begun``: its value at the start), since the system
    clock may have been changed. ``attempt`` is None if another process started it; the system clock is used then.
    """
    end = time.time() if attempt is None else attempt["start_at"] + time.monotonic() - begun
    return {"end": format_time(end), "end_at": end}


def format_time(seconds: float) -> str:
    """Format a Unix time as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


class Goodput(TypedDict):
    """Times of a run; ``lost_steps`` and ``recover_seconds`` have one value per restart."""

    total_seconds: float
    useful_seconds: float
    fraction: float
    lost_steps: list[int]
    recover_seconds: list[float]


class _Trained(NamedTuple):
    """Steps and times (Unix seconds) of an attempt that has ended and completed its first step."""

    first: int
    last: int
    first_step_at: float
    end_at: float


def compute_goodput(attempts: Sequence[Attempt]) -> Goodput:
    """Return the total and useful seconds of a run's attempts, and the cost of each restart.

    Useful time lasts from the first completed step of an attempt to its end, except for steps that were repeated later
    and membership changes of a healing gang. The cost of a restart consists of the lost steps, and of the seconds from
    the end of one attempt to the first completed step of the next. Negative durations count as 0, since attempts may
    use different clocks.

    Args:
        attempts: At least one attempt; the last one must have ended.
    """
    trained = list(_select_trained(attempts))
    total = sum(map(_compute_duration, attempts)) + sum(
        _compute_gap(earlier, later) for earlier, later in pairwise(attempts)
    )
    kept = [later.first for later in trained[1:]] + [each.last for each in trained[-1:]]
    useful = sum(_compute_useful_seconds(each, upto) for each, upto in zip(trained, kept, strict=True))
    useful = min(max(useful - sum(map(_compute_paused_seconds, attempts)), 0.0), total)
    return {
        "total_seconds": total,
        "useful_seconds": useful,
        "fraction": useful / total if total else 0.0,
        "lost_steps": [max(earlier.last - later.first, 0) for earlier, later in pairwise(trained)],
        "recover_seconds": [max(later.first_step_at - earlier.end_at, 0.0) for earlier, later in pairwise(trained)],
    }


def _compute_duration(attempt: Attempt) -> float:
    return max((attempt["end_at"] or 0.0) - attempt["start_at"], 0.0)


def _compute_gap(earlier: Attempt, later: Attempt) -> float:
    return max(later["start_at"] - (earlier["end_at"] or later["start_at"]), 0.0)


def _select_trained(attempts: Sequence[Attempt]) -> Iterator[_Trained]:
    for each in attempts:
        if each["steps"] and each["first_step_at"] and each["end_at"] is not None:
            first, last = each["steps"]
            yield _Trained(first, last, max(each["first_step_at"], each["start_at"]), each["end_at"])


def _compute_useful_seconds(attempt: _Trained, upto: int) -> float:
    """Return the seconds that ``attempt`` spent on steps up to ``upto``."""
    seconds, steps = attempt.end_at - attempt.first_step_at, attempt.last - attempt.first
    done = min(max(upto - attempt.first, 0), steps)
    return max(seconds, 0.0) * done / steps if steps > 0 else 0.0


def _compute_paused_seconds(attempt: Attempt) -> float:
    """Return the seconds without training due to membership changes."""
    seconds, since = 0.0, None
    for each in attempt.get("memberships", ())[1:]:
        since = each["ended"] if since is None else since
        if each["began"] is not None:
            seconds, since = seconds + max(each["began"] - since, 0.0), None
    return min(seconds, _compute_duration(attempt))
