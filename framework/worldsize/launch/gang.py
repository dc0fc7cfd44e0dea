"""Processes that live and die together: wait for them, find the first cause, leave none behind."""

from __future__ import annotations

import json
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


@dataclass(frozen=True)
class Member:
    """One process, where its output goes and where it would leave its error."""

    role: str
    rank: int
    process: BaseProcess
    log: Path
    error: Path

    @property
    def failed(self) -> bool:
        return self.process.exitcode not in (0, None)


class _InterruptedError(Exception):
    def __init__(self, signum: int) -> None:
        self.signum = signum


@final
@dataclass
class Gang(Job):
    """A running gang. ``grace``: seconds for the others to leave their errors once one has failed."""

    run: RunDirectory
    members: Sequence[Member]
    meeting: Path
    grace: float
    terminal_logs: bool
    _dead: list[Member] = field(default_factory=list)

    def wait(self) -> Outcome:
        """Block until all have ended. Ctrl-C and SIGTERM end them all, within ``grace`` seconds."""
        tails = self._tails()
        try:
            with _raised_signals():
                self._join(deadline=None)
            return self._outcome()
        except _InterruptedError as interrupt:
            self.cancel()
            return Outcome("interrupted", 128 + interrupt.signum)
        finally:
            self._kill()
            tails.stop()
            self._copy_errors_to_logs()
            shutil.rmtree(self.meeting, ignore_errors=True)

    def cancel(self) -> None:
        for member in self._alive():
            member.process.terminate()
        self._join(deadline=time.monotonic() + self.grace)

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

    def _outcome(self) -> Outcome:
        failed = [member for member in self._dead if member.failed]
        if not failed:
            return Outcome("completed", 0)
        first = min(failed, key=_time_of_failure)
        code = first.process.exitcode or 1
        return Outcome("failed", 1, Failure(first.role, first.rank, _cause(first), code))

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


@contextmanager
def _raised_signals() -> Iterator[None]:
    """Turn SIGINT and SIGTERM into an exception while the launching process waits."""

    def interrupt(signum: int, _: FrameType | None) -> None:
        raise _InterruptedError(signum)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
