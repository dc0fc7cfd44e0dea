"""Determines which process of a gang failed first, and why, from the processes' exit codes and error files."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NotRequired, TypedDict, final

from worldsize.core import Failure, Outcome
from worldsize.record.flight import hang_report
from worldsize.world.processes import PREEMPTED, Beat


class ProcessError(TypedDict):
    """The error that a process left before it ended: when it failed (ns since the epoch), and its traceback."""

    time_ns: int
    traceback: str
    is_of_host: NotRequired[bool]  # its host is lost: it has not failed itself
    lost_peer: NotRequired[str]  # the error in one line, if a collective raised it because a peer is gone
    is_own: NotRequired[bool]  # it has not waited for another process, even if it ran out of time


@final
@dataclass(frozen=True)
class Ending:
    """The end of one process: exit code, error and last activity."""

    role: str
    rank: int
    exit_code: int  # negative: the signal that ended it
    error: ProcessError | None
    beat: Beat | None  # where it was last
    log: Path
    host: str = ""

    @property
    def time_ns(self) -> int:
        """Time of the failure in ns; 0 without an error file, as if killed: that causes its peers' errors."""
        return self.error["time_ns"] if self.error else 0

    @property
    def has_failed_itself(self) -> bool:
        """Whether the process left an error of its own, other than one that was killed, or whose host is lost."""
        return self.error is not None and not self.error.get("is_of_host", False)

    @property
    def cause(self) -> str:
        """The reason of the failure: the process's own error if it left one."""
        if self.error:
            return self.error["traceback"]
        if self.exit_code < 0:
            return f"killed by {_signal_name(-self.exit_code)}"
        return f"exited with code {self.exit_code} and left no error; its output is in {self.log}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no names
        return f"signal {number}"


def outcome_of(
    deciding: Sequence[Ending], failed: Sequence[Ending], silent: Sequence[Ending], *, signum: int
) -> Outcome:
    """Describe how a gang ended.

    ``deciding``: the processes whose end is the run's end; ``failed``: those that failed by themselves; ``silent``:
    those still alive when the others had ended; ``signum``: the last signal that requested an end, or 0.
    """
    beats = [ending.beat for ending in deciding if ending.beat]
    ended = partial(
        Outcome,
        steps=(beats[0].first, min(beat.done for beat in beats)) if beats else None,
        first_step_at=max((beat.at for beat in beats), default=0.0) or None,
    )
    codes = {ending.exit_code for ending in deciding}
    if codes == {0}:
        return ended("completed", 0)
    if PREEMPTED in codes and codes <= {0, PREEMPTED}:
        return ended("preempted", PREEMPTED)
    # a process that was asked to end and left no error ended for that reason
    if to_blame := [ending for ending in failed if ending.error is not None or not signum]:
        return ended("failed", 1, first_failure(to_blame, silent))
    return ended("interrupted", 128 + (signum or signal.SIGTERM))


def first_failure(failed: Sequence[Ending], silent: Sequence[Ending]) -> Failure:
    """Return the first failure in time; if that rank timed out waiting, blame the peer that never arrived."""
    first = min(failed, key=lambda ending: ending.time_ns)
    cause = first.cause
    is_own = first.error is not None and first.error.get("is_own", False)
    waited = _is_timeout(cause) and not is_own
    if (waited or first.exit_code == -signal.SIGABRT) and (
        report := hang_report([ending.log for ending in (*silent, *failed)])
    ):
        cause = f"{cause.rstrip()}\n{report}"
    if waited and silent:
        first = min(silent, key=lambda ending: ending.beat.step if ending.beat else 0)
        at = f" at step {first.beat.step}" if first.beat else " before its first step"
        cause = f"did not answer{at} while the others waited for it, until cluster.timeout ended that.\n{cause}"
    step = first.beat.step if first.beat else None
    return Failure(first.role, first.rank, cause, first.exit_code or 1, step, first.time_ns, first.host)


def _is_timeout(cause: str) -> bool:
    return re.search(r"[Tt]imed out|[Tt]imeout", cause) is not None
