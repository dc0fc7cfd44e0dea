"""Determines which process of a gang failed first, and why, from exit codes and error files."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NotRequired, TypedDict, final

from worldsize.core import Failure, Outcome
from worldsize.messages import CONFIG_ERROR
from worldsize.record.flight import hang_report
from worldsize.world.processes import PREEMPTED, Beat


class ProcessError(TypedDict):
    """Error of a failed process: time of the failure (ns since the epoch) and traceback."""

    time_ns: int
    traceback: str
    is_of_host: NotRequired[bool]  # the host was lost; the process itself did not fail
    lost_peer: NotRequired[str]  # the error in one line, if a collective raised it because of a lost peer
    is_refusal: NotRequired[bool]  # the process cannot run this configuration
    has_wrong_bits: NotRequired[bool]  # memory or a processor of this or another process fails
    ends_run: NotRequired[bool]  # the others must not continue without this process
    is_of_other: NotRequired[bool]  # another process, which fails too, caused the error
    is_own: NotRequired[bool]  # the process was not waiting for a peer, even if it timed out


@final
@dataclass(frozen=True)
class Ending:
    """Exit code, error and last progress of a process that has exited."""

    role: str
    rank: int
    exit_code: int  # negative signal number if killed by a signal
    error: ProcessError | None
    beat: Beat | None
    log: Path
    host: str = ""

    @property
    def time_ns(self) -> int:
        """Time of the failure in ns; 0 for a killed process, so that it precedes its peers' errors."""
        return self.error["time_ns"] if self.error else 0

    @property
    def has_failed_itself(self) -> bool:
        """Whether the process wrote an error itself; False if it was killed or its host was lost."""
        return self.error is not None and not self.error.get("is_of_host", False)

    @property
    def has_wrong_bits(self) -> bool:
        """Whether this or another process had wrong bits, which a restart may compute again."""
        return self.error is not None and self.error.get("has_wrong_bits", False)

    @property
    def ends_run(self) -> bool:
        """Whether the others must not continue without this process."""
        return self.error is not None and self.error.get("ends_run", False)

    @property
    def cause(self) -> str:
        """Cause of the failure: the traceback, or else the signal or exit code."""
        if self.error:
            return self.error["traceback"]
        if self.exit_code < 0:
            return f"killed by {_signal_name(-self.exit_code)}"
        return f"exited with code {self.exit_code} without an error report; see the output in {self.log}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


def determine_outcome(
    deciding: Sequence[Ending], failed: Sequence[Ending], silent: Sequence[Ending], *, signum: int
) -> Outcome:
    """Return the outcome of a gang.

    ``deciding`` are the processes that must complete for the run to complete, ``failed`` those that failed by
    themselves, and ``silent`` those still alive after the wait. ``signum`` is the last termination signal, or 0.
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
    # after a termination signal, a process without an error only obeyed the signal
    if to_blame := [ending for ending in failed if ending.error is not None or not signum]:
        outcome = ended("failed", 1, first_failure(to_blame, silent))
        return replace(outcome, exit_code=CONFIG_ERROR) if outcome.is_refused else outcome
    return ended("interrupted", 128 + (signum or signal.SIGTERM))


def first_failure(failed: Sequence[Ending], silent: Sequence[Ending]) -> Failure:
    """Return the earliest failure; for a timeout, blame the peer that did not respond."""
    own = [ending for ending in failed if ending.error is None or not ending.error.get("is_of_other", False)]
    first = min(own or failed, key=lambda ending: ending.time_ns)
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
        cause = f"did not respond{at}; the other processes waited until cluster.timeout.\n{cause}"
    step = first.beat.step if first.beat else None
    refuses = first.error is not None and first.error.get("is_refusal", False)
    return Failure(
        first.role,
        first.rank,
        cause,
        first.exit_code or 1,
        step,
        first.time_ns,
        first.host,
        is_refusal=refuses,
        has_wrong_bits=first.has_wrong_bits,
    )


def _is_timeout(cause: str) -> bool:
    return re.search(r"[Tt]imed out|[Tt]imeout", cause) is not None
