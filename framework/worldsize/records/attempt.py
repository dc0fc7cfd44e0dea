"""Describes the attempts of a run as its manifest lists them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NotRequired, TypedDict

from worldsize.core.launcher import MembershipRecord


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


def end_of(attempt: Attempt | None, *, begun: float) -> dict[str, Any]:
    """Return the end of an attempt, now; ``begun``: when this process began it, by the monotonic clock.

    The end is counted from the start, because the clock may have been set in between. None: another process began it.
    """
    end = time.time() if attempt is None else attempt["start_at"] + time.monotonic() - begun
    return {"end": formatted(end), "end_at": end}


def formatted(seconds: float) -> str:
    """Return Unix time as ISO 8601 in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
