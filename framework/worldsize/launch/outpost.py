"""Runs a host's processes in a healing gang that the first host controls."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import astuple
from multiprocessing.connection import wait
from typing import Any, final

from worldsize.healing.membership import receive_message, send_message
from worldsize.launch.interruption import Signals
from worldsize.launch.members import Member
from worldsize.net.agent_connection import AgentConnection, Mailbox
from worldsize.net.handshake import Message
from worldsize.world.processes import Beat

_BEATS = 1.0  # seconds between two reports of progress
_LONGEST = 100_000  # maximum characters of a reported error


@final
class Outpost:
    """Runs processes on orders of the first host, and forwards their messages and exits.

    Args:
        start: Starts a process, given its role, its rank in the role, and the number of previous starts.
        mail: Messages from the first host; None once it is lost.
        connection: The connection to the first host.
        attempt: Number of the attempt.
    """

    def __init__(
        self,
        start: Callable[[str, int, int], Member],
        mail: Mailbox[Message | None],
        connection: AgentConnection,
        attempt: int,
    ) -> None:
        self._start, self._mail, self._connection, self._attempt = start, mail, connection, attempt
        self._members: dict[int, Member] = {}  # running processes by global rank
        self._beats: dict[int, Beat | None] = {}
        self.is_asked = False  # whether a signal has asked this host to save and exit

    def run(self) -> bool:
        """Serve until the attempt ends (True) or the first host is lost (False); then kill all."""
        asked = False
        with Signals() as signals:
            try:
                while True:
                    members = {member.process.sentinel: rank for rank, member in self._members.items()}
                    pipes = {member.pipe: rank for rank, member in self._members.items() if not _is_closed(member)}
                    files: list[Any] = [*members, *pipes, self._mail.arrival, signals.arrival]
                    ready: Any
                    for ready in wait(files, _BEATS):
                        if ready is self._mail.arrival:
                            message = self._mail.get()
                            if message is None or message.get("abort") == self._attempt:
                                return message is not None
                            self._execute_order(message)
                        elif ready == signals.arrival:
                            signals.drain_arrival()
                        elif ready in members:
                            self._report_end(members[ready])
                        else:
                            self._pass_on(pipes[ready])
                    if signals.seen and not asked:  # other hosts' ranks then agree to save at the same step
                        asked = True
                        self._send_signal([*self._members], signal.SIGTERM)
                    self._report_beats()
            finally:
                self.is_asked = bool(signals.seen)
                self._send_signal([*self._members], signal.SIGKILL)
                for member in self._members.values():
                    member.process.join()

    def _execute_order(self, message: Message) -> None:
        match message:
            case {"rank": int(rank), "role": str(role), "role_rank": int(role_rank), "starts": int(starts)}:
                self._start_process(rank, role, role_rank, starts)
            case {"rank": int(rank), "tell": dict(said)} if rank in self._members:
                pipe = self._members[rank].pipe
                try:
                    if pipe is not None:
                        send_message(pipe, said)
                except OSError:  # already exited; the sentinel reports it
                    return
            case {"rank": int(rank), "signal": str(name)} if rank in self._members:
                self._send_signal([rank], signal.Signals[name])

    def _start_process(self, rank: int, role: str, role_rank: int, starts: int) -> None:
        try:
            member = self._start(role, role_rank, starts)
        except OSError as error:  # process limit reached, or disk full
            self._send_report(rank=rank, code=1, error={"time_ns": 0, "traceback": f"failed to start: {error}"})
            return
        self._members[rank] = member
        self._send_report(rank=rank, pid=member.process.pid)

    def _pass_on(self, rank: int) -> None:
        member = self._members.get(rank)
        if member is None or member.pipe is None:
            return
        try:
            message = receive_message(member.pipe)
        except (OSError, EOFError, ValueError):  # already exited; the sentinel reports it
            member.pipe.close()
            return
        self._send_report(rank=rank, said=message)

    def _report_end(self, rank: int) -> None:
        member = self._members.pop(rank)
        member.process.join()
        ending = member.read_ending()
        if ending.beat:
            self._send_report(rank=rank, beat=astuple(ending.beat))
        error = {**ending.error, "traceback": ending.error["traceback"][-_LONGEST:]} if ending.error else None
        self._send_report(rank=rank, code=ending.exit_code, error=error)

    def _report_beats(self) -> None:
        for rank, member in self._members.items():
            beat = member.beat
            if beat is not None and beat != self._beats.get(rank):
                self._beats[rank] = beat
                self._send_report(rank=rank, beat=astuple(beat))

    def _send_signal(self, ranks: list[int], number: int) -> None:
        for rank in ranks:
            pid = self._members[rank].process.pid
            if pid is not None and self._members[rank].process.is_alive():
                os.kill(pid, number)

    def _send_report(self, **message: object) -> None:
        try:
            self._connection.send(**message)
        except OSError:  # the receiving thread detects it, too
            return


def _is_closed(member: Member) -> bool:
    return member.pipe is None or member.pipe.closed
