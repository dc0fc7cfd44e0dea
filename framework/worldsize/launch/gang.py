"""Processes that live and die together: wait for them, find the first cause, leave none behind."""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, final

from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from worldsize.core import Failure, Job, Outcome
from worldsize.run_directory import RunDirectory
from worldsize.world.heartbeat import Beat, read_beat
from worldsize.world.preemption import PREEMPTED, SIGNALS


@dataclass(frozen=True)
class Member:
    """One process, where its output goes, where it would leave its error, and where it says how far it is."""

    role: str
    rank: int
    process: BaseProcess
    log: Path
    error: Path
    heartbeat: Path

    @property
    def failed(self) -> bool:
        return self.process.exitcode not in (0, PREEMPTED, None)

    @property
    def beat(self) -> Beat | None:
        return read_beat(self.heartbeat)


class _InterruptedError(Exception):
    def __init__(self, signum: int) -> None:
        self.signum = signum


@final
@dataclass
class Gang(Job):
    """A running gang. Graces in seconds: ``grace`` for the others to leave their errors once one has failed,
    ``interrupt_grace`` to save after Ctrl-C, ``save_grace`` to save after SIGTERM and SIGUSR1.
    """

    run: RunDirectory
    members: Sequence[Member]
    meeting: Path
    grace: float
    interrupt_grace: float
    save_grace: float
    terminal_logs: bool
    _dead: list[Member] = field(default_factory=list)
    _silent: list[Member] = field(default_factory=list)

    def wait(self) -> Outcome:
        """Block until all have ended. A first signal is passed on, so that they save and end; a second ends them."""
        tails, signum = self._tails(), 0
        try:
            with _raised_signals():
                try:
                    self._join(deadline=None)
                except _InterruptedError as interrupt:
                    signum = interrupt.signum
                    self._ask(self.interrupt_grace if signum == signal.SIGINT else self.save_grace)
        except _InterruptedError as interrupt:
            signum = interrupt.signum
        finally:
            self._silent = self._alive()
            self._kill()
            tails.stop()
            self._copy_errors_to_logs()
            outcome = self._outcome(signum)
            shutil.rmtree(self.meeting, ignore_errors=True)
        return outcome

    def cancel(self) -> None:
        self._ask(self.save_grace)

    def _ask(self, grace: float) -> None:
        for member in self._alive():
            member.process.terminate()
        self._join(deadline=time.monotonic() + grace)

    def _alive(self) -> list[Member]:
        return [member for member in self.members if member.process.is_alive()]

    def _join(self, deadline: float | None) -> None:
        """Wait for the end of all, or until ``deadline``, which the first failure sets if it is None."""
        while alive := {member.process.sentinel: member for member in self.members if member not in self._dead}:
            timeout = None if deadline is None else deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                return
            for sentinel in wait(list(alive), timeout):
                self._bury(alive[sentinel])  # type: ignore[index]
            if deadline is None and any(member.failed for member in self._dead):
                deadline = time.monotonic() + self.grace

    def _bury(self, member: Member) -> None:
        member.process.join()
        self._dead.append(member)

    def _kill(self) -> None:
        for member in self._alive():
            member.process.kill()
            member.process.join()

    def _outcome(self, signum: int) -> Outcome:
        beats = [beat for member in self.members if (beat := member.beat)]
        facts: dict[str, Any] = {
            "steps": (beats[0].first, min(beat.done for beat in beats)) if beats else None,
            "first_step_at": max((beat.at for beat in beats), default=0.0) or None,
        }
        codes = {member.process.exitcode for member in self.members}
        failed = [member for member in self._dead if member.failed and not (signum and _error(member) is None)]
        if codes == {0}:
            return Outcome("completed", 0, **facts)
        if codes == {PREEMPTED}:
            return Outcome("preempted", PREEMPTED, **facts)
        if failed:
            failure = self._failure(min(failed, key=_time_of_failure))
            return Outcome("failed", 1, failure, **facts)
        return Outcome("interrupted", 128 + (signum or signal.SIGTERM), **facts)

    def _failure(self, first: Member) -> Failure:
        """Of a rank that waited in vain, the cause is the one that did not come."""
        cause = _cause(first)
        if _is_timeout(cause) and self._silent:
            first = min(self._silent, key=lambda member: member.beat.step if member.beat else 0)
            at = f" at step {first.beat.step}" if first.beat else " before its first step"
            cause = f"did not answer{at} while the others waited for it, until cluster.timeout ended that.\n{cause}"
        step = first.beat.step if first.beat else None
        return Failure(first.role, first.rank, cause, first.process.exitcode or 1, step)

    def _tails(self) -> TailLog:
        shown = self.members if self.terminal_logs else []
        files = {index: str(member.log) for index, member in enumerate(shown)}
        prefixes = {index: f"[{member.role} {member.rank}] " for index, member in enumerate(shown)}
        return TailLog("worker", files, sys.stdout, prefixes).start()

    def _copy_errors_to_logs(self) -> None:
        # not written there by the process itself: the terminal shows the logs, and the first cause comes first
        for member in self.members:
            if error := _error(member):
                with suppress(OSError), member.log.open("a") as log:
                    log.write(error["traceback"])


def _error(member: Member) -> dict[str, Any] | None:
    try:
        error: dict[str, Any] = json.loads(member.error.read_text())
        return error
    except (OSError, ValueError):
        return None


def _time_of_failure(member: Member) -> int:
    """Nanoseconds; a process that a signal ended is the cause of its peers' errors, so it comes before them."""
    error = _error(member)
    return error["time_ns"] if error else 0


def _cause(member: Member) -> str:
    code = member.process.exitcode or 0
    if error := _error(member):
        return str(error["traceback"])
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with code {code} and left no error; its output is in {member.log}"


def _is_timeout(cause: str) -> bool:
    return re.search(r"[Tt]imed out|[Tt]imeout", cause) is not None


@contextmanager
def _raised_signals() -> Iterator[None]:
    """Turn the signals that ask for an end into an exception while the launching process waits."""

    def interrupt(signum: int, _: FrameType | None) -> None:
        raise _InterruptedError(signum)

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
