"""Describes the attempts of a run as its manifest lists them, and computes the goodput over all of them.

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
from worldsize.record.redaction import without_credentials
from worldsize.world.environments import job_of

LAUNCHER = "launcher"  # the role of the process that starts the others
FAILURE = "failure"  # the name of its event
_LONGEST_CAUSE = 1000  # characters


class FailureRecord(TypedDict):
    """The first process of an attempt that failed, and the cause.

    Attributes:
        role: Its role; "node" for a whole host, "launcher" for the process that starts the others.
        rank: Its rank in its role; of a node its number.
        host: Name of its host; empty: not known.
        step: The step that it was computing; None: not known.
        cause: Its error in one line.
    """

    role: str
    rank: int
    host: str
    step: int | None
    cause: str


class Attempt(TypedDict):
    """One attempt to train a run, from the start of its processes to their end.

    Attributes:
        number: Its number, from 1.
        start: Time of its start (ISO 8601, UTC).
        start_at: The same in Unix seconds.
        end: Time of its end; None: it has not ended.
        end_at: The same in Unix seconds.
        steps: Two numbers: the steps done before it began, and when it ended; None: unknown.
        first_step_at: End of its first step in Unix seconds; None: it has done none.
        exit_reason: "running", or why it ended.
        exit_code: The run's exit code; None: it is running, or was killed.
        hosts: Hosts that took part, the launching one first.
        world_size: The number of its processes.
        pid: Process id of the launching process.
        job: The scheduler's job that it ran in.
        pinning: The cores and the memory of each process of the launching host, or why they are not pinned.
        transport: The transports that collectives used; in a gang that heals, those of its last membership.
        memberships: Who trained from which step on, in a gang that heals.
        lost_metrics: Logged steps of earlier attempts that ``metrics.jsonl`` lacked when it began.
        lost_host: Its first host, if that was lost and the next attempt began without it.
        failure: Why it failed, if it did.
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
    """Describe an attempt that this process begins, on this host and ``others``."""
    now = time.time()
    attempt: Attempt = {
        "number": number,
        "start": formatted(now),
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
    if job := job_of(os.environ):
        attempt["job"] = job
    return attempt


def failure_of(failure: Failure) -> FailureRecord:
    """Return a failure as it is recorded; its cause may be a traceback. Credentials in URLs are removed."""
    cause = without_credentials(last_error(failure.cause))[:_LONGEST_CAUSE]
    return {"role": failure.role, "rank": failure.rank, "host": failure.host, "step": failure.step, "cause": cause}


def failure_of_launcher(cause: str, host: str | None = None) -> FailureRecord:
    """Return the failure of the process that starts the others, on ``host`` or this one."""
    return failure_of(Failure(LAUNCHER, 0, cause, 1, host=host or socket.gethostname()))


def last_failure(attempts: Sequence[Attempt]) -> str | None:
    """Return the cause of the last attempt's failure, in a line; None: it did not fail."""
    failure = attempts[-1].get("failure") if attempts else None
    return failure_text(failure) if failure else None


def failure_text(failure: Mapping[str, object]) -> str:
    """Say in one line for people who failed where, at which step and why, as a FailureRecord has it."""
    where = f" on {host}" if (host := failure.get("host")) else ""
    step = f" at step {step}" if (step := failure.get("step")) else ""
    role = failure.get("role")
    who = "the launching process" if role == LAUNCHER else f"{role} {failure.get('rank')}"
    return printable(f"{who}{where} failed{step}: {failure.get('cause')}")


def note_failure(events: Path, attempt: Attempt) -> None:
    """Append the failure of an attempt, if it has one, to ``events.jsonl``, unless that cannot be written."""
    if failure := attempt.get("failure"):
        row = {"event": FAILURE, "time": attempt["end_at"], "attempt": attempt["number"], **failure}
        with suppress(OSError), open_regular(events, append=True) as file:
            file.write(f"{json.dumps(row)}\n".encode())


def end_of(attempt: Attempt | None, *, begun: float) -> dict[str, Any]:
    """Return the end of an attempt, now; ``begun``: when this process began it, by the monotonic clock.

    The end is counted from the start, because the clock may have been set in between. None: another process began it.
    """
    end = time.time() if attempt is None else attempt["start_at"] + time.monotonic() - begun
    return {"end": formatted(end), "end_at": end}


def formatted(seconds: float) -> str:
    """Return Unix time as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


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
