"""The first cause of a failure is found from the traces of the processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from worldsize.launch.first_cause import Ending, ProcessError, determine_outcome
from worldsize.world.processes import PREEMPTED, Beat


def ending(rank: int, code: int, *, error: str | None = None, at: int = 0, step: int = 4) -> Ending:
    """Return the end of a worker that left ``error`` at the time ``at`` and was in ``step``."""
    left: ProcessError | None = None if error is None else {"traceback": error, "time_ns": at}
    return Ending("worker", rank, code, left, Beat(step, 0, step - 1, 0.0), Path(f"worker_{rank}.log"))


def test_the_first_error_in_time_is_the_cause() -> None:
    failed = [ending(0, 1, error="late", at=9), ending(1, 1, error="early", at=7)]
    failure = determine_outcome(failed, failed, [], signum=0).failure
    assert failure is not None
    assert (failure.rank, failure.cause, failure.step, failure.exit_code) == (1, "early", 4, 1)


def test_a_process_that_a_signal_ended_comes_before_the_errors_of_its_peers() -> None:
    failed = [ending(0, 1, error="connection reset", at=9), ending(1, -signal.SIGKILL)]
    failure = determine_outcome(failed, failed, [], signum=0).failure
    assert failure is not None
    assert (failure.rank, failure.cause, failure.exit_code) == (1, "killed by SIGKILL", -signal.SIGKILL)


def test_a_process_that_a_real_time_signal_ended_has_a_cause_too() -> None:
    assert ending(1, -40).cause == "killed by signal 40"


def test_the_peer_furthest_behind_is_blamed_if_a_rank_timed_out_waiting() -> None:
    failed = [ending(0, 1, error="Timed out waiting 5000ms", at=9)]
    silent = [ending(1, -signal.SIGKILL, step=4), ending(2, -signal.SIGKILL, step=3)]
    failure = determine_outcome([*failed, *silent], failed, silent, signum=0).failure
    assert failure is not None
    assert (failure.rank, failure.step) == (2, 3)
    assert failure.cause.startswith("did not respond at step 3; the other processes waited until cluster.timeout")
    assert failure.cause.endswith("Timed out waiting 5000ms")


@pytest.mark.parametrize(
    ("codes", "signum", "reason", "code"),
    [
        ((0, 0), 0, "completed", 0),
        ((0, PREEMPTED), signal.SIGTERM, "preempted", PREEMPTED),
        ((-signal.SIGKILL, PREEMPTED), signal.SIGINT, "interrupted", 128 + signal.SIGINT),
        ((-signal.SIGKILL, -signal.SIGKILL), 0, "interrupted", 128 + signal.SIGTERM),  # cancelled by a different thread
    ],
)
def test_a_gang_in_which_nothing_failed_is_what_its_exit_codes_say(
    codes: tuple[int, int], signum: int, reason: str, code: int
) -> None:
    endings = [ending(rank, code) for rank, code in enumerate(codes)]
    outcome = determine_outcome(endings, [], [], signum=signum)
    assert (outcome.exit_reason, outcome.exit_code, outcome.failure) == (reason, code, None)
    assert outcome.steps == (0, 3)


def test_who_was_asked_to_end_and_left_no_error_has_not_failed() -> None:
    endings = [ending(0, -signal.SIGTERM), ending(1, 1, error="a bug", at=9)]
    assert determine_outcome(endings, endings[:1], [], signum=signal.SIGTERM).exit_reason == "interrupted"
    failure = determine_outcome(endings, endings, [], signum=signal.SIGTERM).failure
    assert failure is not None
    assert failure.rank == 1
