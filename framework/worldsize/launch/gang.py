"""Waits for processes that end together, finds the first cause of a failure, and leaves no process behind."""

from __future__ import annotations

import shutil
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, final

from worldsize.core import Job, Outcome
from worldsize.launch.control import Control
from worldsize.launch.first_cause import outcome_of
from worldsize.launch.interruption import Abort, FolderWatch, Signals
from worldsize.launch.members import Member, Members
from worldsize.launch.membership_server import MembershipServer, Resize
from worldsize.record.run_directory import RunDirectory


@final
@dataclass(frozen=True)
class Graces:
    """Seconds that processes get to end by themselves before they are killed."""

    failure: float  # to leave their errors once one has failed
    interrupt: float  # to save after Ctrl-C
    save: float  # to save after SIGTERM and SIGUSR1


@final
class Gang(Job):
    """The running processes of one host.

    ``folder``: private folder of their heartbeats, removed at the end. ``leads``: accept requests to add and remove
    workers, which only the first host does. ``server``: tells the processes of a gang that heals of each other.
    ``helpers``: run beside them until they have ended.
    """

    def __init__(
        self,
        run: RunDirectory,
        members: Members,
        folder: Path,
        graces: Graces,
        *,
        leads: bool,
        server: MembershipServer | None = None,
        helpers: Sequence[AbstractContextManager[object]] = (),
    ) -> None:
        self._members, self._folder, self._graces = members, folder, graces
        self._server, self._helpers = server, helpers
        self._control_sign = run.control if leads else None  # without a sign nobody could find the socket
        self._folder_watch = FolderWatch(run.manifest)
        self._abort = Abort()

    def wait(self) -> Outcome:
        """Block until all have ended. A first signal is forwarded, so that they save and end; a second kills them.

        They are killed at once if the run's folder is deleted, since no result could be saved.
        """
        signals = Signals()
        sign = self._control_sign
        control = Control(self._folder / "control", sign, Resize(self._members, self._server)) if sign else None
        try:
            with signals, control or nullcontext(), ExitStack() as stack:
                for helper in self._helpers:
                    stack.enter_context(helper)
                self._join(signals, control)
                if signals.seen and not self._abort.is_requested:
                    self._ask_to_save(signals, control)
        finally:
            silent = self._members.kill()
            try:
                outcome = self._ended(silent, signals.seen[-1] if signals.seen else 0)
            finally:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._abort.close()
        return outcome

    def abort(self) -> None:
        """Kill all processes; may be called by another thread while :meth:`wait` waits."""
        self._abort.request()

    def cancel(self) -> None:
        self._members.terminate()

    def _ended(self, silent: Sequence[Member], signum: int) -> Outcome:
        """Show the remaining output of all processes; return how the gang ended."""
        if terminal := self._members.terminal:
            terminal.close()
        outcome = self._outcome(silent, signum)
        for member in self._members.current:
            member.copy_error_to_log(outcome.failure)
        return outcome

    def _ask_to_save(self, signals: Signals, control: Control | None) -> None:
        """Ask all processes once to save and end; the next signal or the grace period ends the wait."""
        grace = self._graces.interrupt if signals.seen[0] == signal.SIGINT else self._graces.save
        self.cancel()
        self._join(signals, control, asked=1, deadline=time.monotonic() + grace)

    def _join(
        self, signals: Signals, control: Control | None, *, asked: int = 0, deadline: float | None = None
    ) -> None:
        """Wait until all have ended, more than ``asked`` signals came, ``deadline`` passed, or the folder is deleted.

        The first failure sets the deadline if it is None.
        """
        while awaited := self._members.awaited():
            timeout = None if deadline is None else deadline - time.monotonic()
            if len(signals.seen) > asked or self._abort.is_requested or (timeout is not None and timeout <= 0):
                return
            if self._folder_watch.look():
                return
            sockets, seconds = control.awaited() if control else ((), None)
            pipes, patient = self._server.awaited() if self._server else ((), None)
            patience = min(each for each in (timeout, seconds, patient, FolderWatch.interval) if each is not None)
            files: list[Any] = [*awaited, signals.arrival, self._abort.arrival, *sockets, *pipes]
            ready: Any
            for ready in wait(files, patience):
                if ready == signals.arrival:
                    signals.drain()
                elif ready == self._abort.arrival:
                    break
                elif control and isinstance(ready, socket.socket):
                    control.answer(ready)
                elif self._server and ready in pipes:
                    self._server.answer(ready)
                else:
                    self._note_end(awaited[ready])
            if deadline is None and self._members.must_end:
                deadline = time.monotonic() + self._graces.failure

    def _note_end(self, member: Member) -> None:
        self._members.note_end(member)
        if self._server:
            self._server.note_end(member)

    def _outcome(self, silent: Sequence[Member], signum: int) -> Outcome:
        if self._folder_watch.is_deleted:
            return Outcome("failed", 1)
        deciding = [member.ending() for member in self._members.deciding or self._members.current]
        failed = [member.ending() for member in self._members.ended if member.failed]
        outcome = outcome_of(deciding, failed, [member.ending() for member in silent], signum=signum)
        if self._server is None or not self._server.records:
            return outcome
        records = self._server.records
        # newcomers began later, and those that wait or have died did not complete the last steps
        last = max((ending.beat.done for ending in deciding if ending.beat), default=0)
        steps = (records[0]["first"], last) if outcome.steps else None
        return replace(outcome, memberships=records, steps=steps, first_step_at=records[0]["began"])
