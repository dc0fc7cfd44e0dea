"""Processes that live and die together: wait for them, find the first cause, leave none behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, final

from worldsize.core import ConfigError, Failure, Job, Outcome, Role
from worldsize.launch.control import Control
from worldsize.records.run_directory import RunDirectory
from worldsize.world.heartbeat import Beat, read_beat
from worldsize.world.preemption import PREEMPTED, SIGNALS

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog


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


@final
class _Signals:
    """The signals that asked for an end, in their order, while the launching process waits.

    They are noted, not raised: of two that come together neither is lost. Each makes ``arrival`` readable, also one
    that the kernel hands to another thread, which would not wake the main thread.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.arrival, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        signal.set_wakeup_fd(self._write)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.arrival)
        os.close(self._write)

    def drain(self) -> None:
        os.read(self.arrival, 1024)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.seen.append(number)


@final
@dataclass
class Gang(Job):
    """A running gang. Graces in seconds: ``grace`` for the others to leave their errors once one has failed,
    ``interrupt_grace`` to save after Ctrl-C, ``save_grace`` to save after SIGTERM and SIGUSR1.

    ``start(role, rank, starts)`` starts a process, which was started so often before. One that dies alone, by its
    role, is started again ``max_restarts`` times; then the run goes on without it as long as ``min_processes`` of
    its role live.
    """

    run: RunDirectory
    roles: Mapping[str, Role]
    start: Callable[[str, int, int], Member]
    meeting: Path
    grace: float
    interrupt_grace: float
    save_grace: float
    terminal_logs: bool
    max_restarts: int
    leads: bool = True  # takes requests to add and remove workers
    members: list[Member] = field(default_factory=list)
    _dead: list[Member] = field(default_factory=list)
    _lost: list[Member] = field(default_factory=list)  # dead, and the run has gone on
    _silent: list[Member] = field(default_factory=list)
    _tails: list[TailLog] = field(default_factory=list)
    _abortion: tuple[int, int] = field(default_factory=lambda: os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
    _aborted: bool = False
    _over: bool = False
    _ending: threading.Lock = field(default_factory=threading.Lock)  # guards the pipe, which another thread writes to

    def add(self, role: str, rank: int) -> None:
        member = self.start(role, rank, self._starts(role, rank))
        self.members.append(member)
        if self.terminal_logs:
            from torch.distributed.elastic.multiprocessing.tail_log import TailLog  # takes seconds, as torch does

            prefix = f"[{role} {rank}] "
            self._tails.append(TailLog(prefix, {0: str(member.log)}, sys.stdout, {0: prefix}).start())

    def wait(self) -> Outcome:
        """Block until all have ended. A first signal is passed on, so that they save and end; a second ends them."""
        signals = _Signals()
        control = Control(self.meeting / "control", self.run.control if self.leads else None, self)
        try:
            with signals, control:
                self._join(signals, control)
                if signals.seen and not self._aborted:
                    self._ask(signals, control)
        finally:
            self._silent = self._alive()
            self._kill()
            for tail in self._tails:
                tail.stop()
            self._copy_errors_to_logs()
            outcome = self._outcome(signals.seen[-1] if signals.seen else 0)
            shutil.rmtree(self.meeting, ignore_errors=True)
            with self._ending:
                self._over = True
                for end in self._abortion:
                    os.close(end)
        return outcome

    def abort(self) -> None:
        """End all at once; may be called by another thread while :meth:`wait` waits."""
        with self._ending:
            self._aborted = True
            if not self._over:
                os.write(self._abortion[1], b"!")

    def grow(self, count: int) -> list[str]:
        """Start ``count`` more processes of the last role, if that may change; their names."""
        role = self._growing()
        taken = [member.rank for member in (*self.members, *self._lost) if member.role == role]
        first = max(max(taken) + 1, self.roles[role].processes)
        for rank in range(first, first + count):
            self.add(role, rank)
        return [f"{role} {rank}" for rank in range(first, first + count)]

    def shrink(self, count: int) -> list[str]:
        """Ask the ``count`` youngest processes of the last role to leave; their names."""
        role = self._growing()
        alive = [member for member in self._alive() if member.role == role]
        if len(alive) - count < (self.roles[role].min_processes or 0):
            raise ConfigError(
                f"of {len(alive)} {role}s at least {self.roles[role].min_processes} must stay. Remove fewer."
            )
        for member in alive[len(alive) - count :]:
            member.process.terminate()
        return [f"{member.role} {member.rank}" for member in alive[len(alive) - count :]]

    def listed(self) -> list[dict[str, Any]]:
        """Role, rank, process id and step of each process that lives."""
        return [
            {"role": m.role, "rank": m.rank, "pid": m.process.pid, "step": m.beat.step if m.beat else None}
            for m in self._alive()
        ]

    def _growing(self) -> str:
        name, role = list(self.roles.items())[-1]
        if role.restart != "individual":
            raise ConfigError(
                f"the {name}s of this run are a gang, whose size is fixed. Start it again with another "
                "cluster.processes, or use strategy=parameter_server."
            )
        return name

    def cancel(self) -> None:
        for member in self._alive():
            member.process.terminate()

    def _ask(self, signals: _Signals, control: Control) -> None:
        """Ask all to save and to end, once; the next signal or the grace ends the wait."""
        grace = self.interrupt_grace if signals.seen[0] == signal.SIGINT else self.save_grace
        self.cancel()
        self._join(signals, control, asked=1, deadline=time.monotonic() + grace)

    def _alive(self) -> list[Member]:
        return [member for member in self.members if member.process.is_alive()]

    def _join(self, signals: _Signals, control: Control, *, asked: int = 0, deadline: float | None = None) -> None:
        """Wait for the end of all, for a signal after the first ``asked``, or until ``deadline``.

        The first failure sets the deadline if it is None.
        """
        while alive := {member.process.sentinel: member for member in self.members if member not in self._dead}:
            timeout = None if deadline is None else deadline - time.monotonic()
            if len(signals.seen) > asked or self._aborted or (timeout is not None and timeout <= 0):
                return
            for ready in wait([*alive, signals.arrival, self._abortion[0], control.listener], timeout):
                if ready == signals.arrival:
                    signals.drain()
                elif ready == self._abortion[0]:
                    break
                elif ready is control.listener:
                    control.answer()
                else:
                    self._bury(alive[ready])  # type: ignore[index]
            if deadline is None and (any(member.failed for member in self._dead) or self._is_over()):
                deadline = time.monotonic() + self.grace

    def _bury(self, member: Member) -> None:
        member.process.join()
        self._dead.append(member)
        if member.failed and self.roles[member.role].restart == "individual" and not self._is_ending():
            self._replace(member)

    def _starts(self, role: str, rank: int) -> int:
        return sum((lost.role, lost.rank) == (role, rank) for lost in self._lost)

    def _is_ending(self) -> bool:
        return any(self._is_bound(member) and not member.failed for member in self._dead)

    def _is_over(self) -> bool:
        """Whether only those are left that come and go."""
        bound = [member for member in self.members if self._is_bound(member)]
        return bool(bound) and all(member in self._dead for member in bound)

    def _is_bound(self, member: Member) -> bool:
        """Whether the run's end is its end; only processes of the last role may come and go."""
        return member.role != list(self.roles)[-1] or self.roles[member.role].restart == "gang"

    def _replace(self, member: Member) -> None:
        """Start a process again that died alone, or go on without it; if neither may be, its failure is the gang's."""
        role, cause = self.roles[member.role], _cause(member).rstrip().splitlines()[-1]
        starts = self._starts(member.role, member.rank)
        others = sum(each.role == member.role and each.process.is_alive() for each in self.members)
        if starts < self.max_restarts:
            what = f"starting it again ({starts + 1} of {self.max_restarts})"
        elif others >= (role.processes if role.min_processes is None else role.min_processes):
            what = "going on without it"
        else:
            return
        print(f"{member.role} {member.rank} failed: {cause}; {what}", file=sys.stderr, flush=True)
        self._dead.remove(member)
        self.members.remove(member)
        self._lost.append(member)
        if starts < self.max_restarts:
            self.add(member.role, member.rank)

    def _kill(self) -> None:
        for member in self._alive():
            member.process.kill()
            member.process.join()

    def _outcome(self, signum: int) -> Outcome:
        bound = [member for member in self.members if self._is_bound(member)] or self.members
        beats = [beat for member in bound if (beat := member.beat)]
        facts: dict[str, Any] = {
            "steps": (beats[0].first, min(beat.done for beat in beats)) if beats else None,
            "first_step_at": max((beat.at for beat in beats), default=0.0) or None,
        }
        codes = {member.process.exitcode for member in bound}
        failed = [member for member in self._dead if member.failed and not (signum and _error(member) is None)]
        if codes == {0}:
            return Outcome("completed", 0, **facts)
        if PREEMPTED in codes and codes <= {0, PREEMPTED}:
            return Outcome("preempted", PREEMPTED, **facts)
        if failed:
            failure = self._failure(min(failed, key=_time_of_failure))
            return Outcome("failed", 1, failure, **facts)
        return Outcome("interrupted", 128 + (signum or signal.SIGTERM), **facts)

    def _failure(self, first: Member) -> Failure:
        """Blame the peer that never arrived if a rank timed out waiting."""
        cause = _cause(first)
        if _is_timeout(cause) and self._silent:
            first = min(self._silent, key=lambda member: member.beat.step if member.beat else 0)
            at = f" at step {first.beat.step}" if first.beat else " before its first step"
            cause = f"did not answer{at} while the others waited for it, until cluster.timeout ended that.\n{cause}"
        step = first.beat.step if first.beat else None
        return Failure(first.role, first.rank, cause, first.process.exitcode or 1, step, _time_of_failure(first))

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
