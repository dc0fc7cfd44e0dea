"""Waits for a gang of processes, finds the first cause of a failure, and kills the rest."""

from __future__ import annotations

import logging
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
from worldsize.launch.first_cause import determine_outcome
from worldsize.launch.interruption import Abort, FolderWatch, Signals
from worldsize.launch.members import Member, Members
from worldsize.launch.membership_server import MembershipServer, Resize
from worldsize.record.run_directory import RunDirectory

_logger = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Graces:
    """Grace periods in seconds for processes to exit by themselves before they are killed."""

    failure: float  # for writing errors after one process has failed
    interrupt: float  # for saving after Ctrl-C
    save: float  # for saving after any other termination signal


@final
class Gang(Job):
    """The running processes of one host.

    ``folder`` is the private folder for the processes' heartbeats, removed at the end. With ``leads``, on the first
    host only, the gang accepts requests to add and remove workers. ``server`` is the membership server of a healing
    gang. ``helpers`` are context managers that stay open until all processes have exited.
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
        self._control_sign = run.control if leads else None  # clients find the socket through this file
        self._folder_watch = FolderWatch(run.manifest)
        self._abort = Abort()

    def wait(self) -> Outcome:
        """Wait until all processes exit.

        A first signal asks the processes to save and exit, a second one kills them. If the run folder is deleted, they
        are killed immediately, since their results could not be saved.
        """
        signals = Signals()
        sign = self._control_sign
        control = Control(self._folder / "control", sign, Resize(self._members, self._server)) if sign else None
        try:
            with signals, control or nullcontext(), ExitStack() as stack:
                for helper in self._helpers:
                    stack.enter_context(helper)
                self._wait_for_exit(signals, control)
                if signals.seen and not self._abort.is_requested:
                    self._ask_to_save(signals, control)
        finally:
            silent = self._members.kill_processes()
            try:
                outcome = self._report_outcome(silent, signals.seen[-1] if signals.seen else 0)
            finally:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._abort.close()
        return outcome

    def abort(self) -> None:
        """Make :meth:`wait` kill all processes; may be called from any thread."""
        self._abort.request_abort()

    def cancel(self) -> None:
        self._members.terminate()

    def _report_outcome(self, silent: Sequence[Member], signum: int) -> Outcome:
        """Show the remaining output of all processes; return the gang's outcome."""
        if terminal := self._members.terminal:
            terminal.close()
        outcome = self._determine_outcome(silent, signum)
        for member in self._members.current:
            member.copy_error_to_log(outcome.failure)
        return outcome

    def _ask_to_save(self, signals: Signals, control: Control | None) -> None:
        """Ask all processes to save and exit, and wait for them.

        The wait also ends with a second signal or the grace period.
        """
        grace = self._graces.save
        if signals.seen[0] == signal.SIGINT:
            grace = self._graces.interrupt
            _logger.warning("Saving a checkpoint before exit. Press Ctrl-C again to exit without saving.")
        self.cancel()
        self._wait_for_exit(signals, control, asked=1, deadline=time.monotonic() + grace)

    def _wait_for_exit(
        self, signals: Signals, control: Control | None, *, asked: int = 0, deadline: float | None = None
    ) -> None:
        """Wait until all processes exit, or a reason to stop waiting occurs.

        The reasons are that ``deadline`` passes, more than ``asked`` signals arrive, an abort is requested, or the run
        folder is deleted. If ``deadline`` is None, it is set once the gang must end.
        """
        while awaited := self._members.map_sentinels():
            timeout = None if deadline is None else deadline - time.monotonic()
            if len(signals.seen) > asked or self._abort.is_requested or (timeout is not None and timeout <= 0):
                return
            if self._folder_watch.is_folder_deleted():
                return
            sockets, seconds = control.collect_sockets() if control else ((), None)
            pipes, patient = self._server.collect_pipes() if self._server else ((), None)
            patience = min(each for each in (timeout, seconds, patient, FolderWatch.interval) if each is not None)
            files: list[Any] = [*awaited, signals.arrival, self._abort.arrival, *sockets, *pipes]
            ready: Any
            for ready in wait(files, patience):
                if ready == signals.arrival:
                    signals.drain_arrival()
                elif ready == self._abort.arrival:
                    break
                elif control and isinstance(ready, socket.socket):
                    control.serve_socket(ready)
                elif self._server and ready in pipes:
                    self._server.serve_pipe(ready)
                else:
                    self._note_end(awaited[ready])
            if deadline is None and self._members.must_end:
                deadline = time.monotonic() + self._graces.failure

    def _note_end(self, member: Member) -> None:
        self._members.note_end(member)
        if self._server:
            self._server.note_end(member)

    def _determine_outcome(self, silent: Sequence[Member], signum: int) -> Outcome:
        if self._folder_watch.is_deleted:
            return Outcome("failed", 1)
        deciding = [member.read_ending() for member in self._members.deciding or self._members.current]
        failed = [member.read_ending() for member in self._members.ended if member.failed]
        outcome = determine_outcome(deciding, failed, [member.read_ending() for member in silent], signum=signum)
        if self._server is None or not self._server.records:
            return outcome
        records = self._server.records
        # late joiners started at a later step, and spares or dead processes did not complete the last steps
        last = max((ending.beat.done for ending in deciding if ending.beat), default=0)
        steps = (records[0]["first"], last) if outcome.steps else None
        return replace(outcome, memberships=records, steps=steps, first_step_at=records[0]["began"])
