"""Relays messages between a gang's roster and its processes, and adds and removes processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import final

from worldsize.core import ConfigError, MembershipRecord
from worldsize.errors import WorldsizeError
from worldsize.healing.membership import Message, Pipe, receive_message, send_message
from worldsize.healing.roster import Roster
from worldsize.launch.control import MOST, JobState, ListedProcess
from worldsize.launch.members import LostHostError, Member, Members
from worldsize.launch.remote import RemoteHosts
from worldsize.messages import last_error
from worldsize.world.roles import count_at_most, find_role, get_blocks, role_ranks

_logger = logging.getLogger(__name__)


@final
class MembershipServer:
    """The roster of a healing gang, with the pipes to its processes.

    ``members`` are the started processes; the last ``spares`` of them wait until others die. A process that does not
    stop within ``patience`` seconds is killed as hung. ``most`` is the number of logical ranks; each block of
    processes needs at least one. ``others`` are the other hosts, which may return after a loss.
    """

    def __init__(
        self,
        members: Members,
        *,
        patience: float,
        most: int,
        spares: int = 0,
        others: RemoteHosts | None = None,
    ) -> None:
        blocks = get_blocks(members.roles)
        self._parts, self._most = most, count_at_most(blocks, most)
        self._members, self._others = members, others
        self._killed: list[Member] = []  # processes killed as hung
        ranks = [self._compute_rank(member) for member in members.current]
        node_of = others.find_node if others else lambda rank: 0
        first = tuple(ranks[: len(ranks) - spares])
        self._roster = Roster(first, self._send_to_member, patience, blocks, most, node_of)

    @property
    def records(self) -> Sequence[MembershipRecord]:
        """Records of all memberships so far."""
        others = self._others
        if others is None:
            return self._roster.records
        return [{**each, "hosts": [*map(others.find_host_name, each["members"])]} for each in self._roster.records]

    def collect_pipes(self) -> tuple[Sequence[Pipe], float | None]:
        """Kill hung members; return the pipes to wait for, and the timeout in seconds or None."""
        seconds = self._roster.seconds_left
        for rank in self._roster.find_late_members():
            member = self._find_member(rank)
            if member is not None and member not in self._killed and member.process.is_alive():
                _logger.error("%s %d is not responding; continuing without it", member.role, member.rank)
                member.process.kill()
                self._killed.append(member)
        pipes = [member.pipe for member in self._members.current if member.pipe is not None and not member.pipe.closed]
        returns = self._others.returns if self._others and not self._members.ended else []
        return [*pipes, *returns], seconds or None  # 0: late members were just killed; sentinels report it

    def serve_pipe(self, ready: Pipe) -> None:
        """Read a message from a readable pipe, and act on it."""
        if self._others and ready in self._others.returns:
            self._take_in(self._others)
            return
        member = next((each for each in self._members.current if each.pipe is ready), None)
        try:
            message = receive_message(ready)
        except (OSError, EOFError, ValueError):  # already exited; the sentinel reports it
            ready.close()
            return
        if member is not None:  # None if it died meanwhile
            self._roster.apply_message(self._compute_rank(member), message)

    def note_end(self, member: Member) -> None:
        """Record that a process exited; call this after :meth:`Members.note_end`."""
        if member in self._members.lost:
            self._roster.lose_rank(self._compute_rank(member), last_error(member.read_ending().cause))
        else:
            self._roster.has_ended(self._compute_rank(member))

    def make_room(self, count: int, training: Sequence[Member]) -> None:
        """Set the roster's target to ``count`` more processes than ``training``.

        Raises:
            ConfigError: there are not enough logical ranks.
        """
        wanted = len(training)
        if wanted + count > self._most:
            ranks, free = self._parts, self._most - wanted
            remedy = f"Add at most {free}, or start" if free > 0 else "Start"
            raise ConfigError(
                f"logical_ranks={ranks} supports at most {self._most} training processes, and {wanted} are "
                f"training. {remedy} a run with a larger logical_ranks."
            )
        self._roster.target = wanted + count

    def note_request(self, member: Member, asked: str) -> None:
        """Record who requested that a process join or leave."""
        self._roster.asked[self._compute_rank(member)] = asked

    def training(self, alive: Sequence[Member]) -> list[Member]:
        """Return the ``alive`` processes that train or will join, without spares and leaving ones."""
        here = [each for each in alive if each not in self._members.leaving]
        members = [each for each in here if self._compute_rank(each) in self._roster.members]
        coming = [each for each in here if each not in members]
        return [*members, *coming[: max(0, self._roster.target - len(members))]]

    def ask_to_leave(self, member: Member) -> None:
        """Remove ``member`` from the gang; its process then exits."""
        self._members.leaving.append(member)
        self._roster.remove_rank(self._compute_rank(member))

    def _take_in(self, others: RemoteHosts) -> None:
        """Start the processes of a returned host; they join between two steps."""
        for rank in others.admit_host({self._compute_rank(member) for member in self._members.current}):
            try:
                self._members.add_process(*find_role(rank, self._members.roles))
            except OSError as error:
                _logger.error("%s", error)

    def _compute_rank(self, member: Member) -> int:
        return role_ranks(self._members.roles)[member.role].start + member.rank

    def _find_member(self, rank: int) -> Member | None:
        return next((each for each in self._members.current if self._compute_rank(each) == rank), None)

    def _send_to_member(self, rank: int, message: Message) -> None:
        member = self._find_member(rank)
        if member is not None and member.pipe is not None:
            with suppress(OSError):  # already exited; the sentinel reports it
                send_message(member.pipe, message)


@final
class Resize:
    """Resizes the last role, for ``worldsize workers`` and autoscaling policies.

    ``server`` is the membership server of a healing gang.
    """

    def __init__(self, members: Members, server: MembershipServer | None = None) -> None:
        self._members, self._server = members, server

    def add_processes(self, count: int, *, asked: str = "workers") -> list[str]:
        """Start ``count`` more processes on behalf of ``asked``; return their names.

        Raises:
            WorldsizeError: a host cannot start them all; the message names the started processes, which keep running.
        """
        role, members = self._find_role(), self._members
        if self._server:
            self._server.make_room(count, self._training())
        taken = [member.rank for member in (*members.current, *members.lost) if member.role == role]
        first = max(max(taken) + 1, members.roles[role].processes)
        names, rank = list[str](), first - 1
        while len(names) < count:
            rank += 1
            try:
                members.add_process(role, rank)
            except LostHostError:
                continue  # try the next host; the first host is never lost, so this ends
            except OSError as error:  # process limit reached, or disk full
                started = f"Started: {', '.join(names)}" if names else "No process was started"
                raise WorldsizeError(f"failed to start {role} {rank}: {error}. {started}.") from error
            if self._server:
                self._server.note_request(members.current[-1], asked)
            names.append(f"{role} {rank}")
        return names

    def remove_processes(self, count: int, *, asked: str = "workers") -> list[str]:
        """Ask the ``count`` newest processes to leave, on behalf of ``asked``; return their names."""
        role, alive = self._find_role(), self._training()
        must_stay = self._members.roles[role].min_processes or (1 if self._server else 0)
        if len(alive) - count < must_stay:
            raise ConfigError(f"at least {must_stay} of {len(alive)} {role}s must remain. Remove fewer.")
        leaving = alive[len(alive) - count :]
        for member in leaving:
            if self._server:
                self._server.note_request(member, asked)
                self._server.ask_to_leave(member)
            else:
                member.process.terminate()
        return [f"{member.role} {member.rank}" for member in leaving]

    def resize_gang(self, processes: int) -> list[str]:
        """Resize the gang for a policy; return the names of the processes that start or leave."""
        more = processes - len(self._training())
        if more == 0 or self._members.ended:
            return []
        change = self.add_processes if more > 0 else self.remove_processes
        return change(min(abs(more), MOST), asked="autoscale")

    def describe_job(self) -> JobState:
        """Return the newest step and the number of training processes, for an autoscaling policy."""
        steps = [member.beat.step for member in self._members.list_alive() if member.beat]
        return {"step": max(steps, default=0), "processes": len(self._training())}

    def list_processes(self) -> list[ListedProcess]:
        """Return role, rank, process ID and step of each live process."""
        alive = self._members.list_alive()
        training = self._server.training(alive) if self._server else alive
        listed: list[ListedProcess] = [
            {"role": m.role, "rank": m.rank, "pid": m.process.pid, "step": m.beat.step if m.beat else None}
            for m in alive
        ]
        for member, facts in zip(alive, listed, strict=True):
            if member not in training and member not in self._members.leaving:
                facts["waits"] = True
        return listed

    def _training(self) -> Sequence[Member]:
        """Return the processes that train or are about to join."""
        role = self._find_role()
        alive = [member for member in self._members.list_alive() if member.role == role]
        return self._server.training(alive) if self._server else alive

    def _find_role(self) -> str:
        name, role = list(self._members.roles.items())[-1]
        if role.restart == "gang":
            raise ConfigError(
                f"the number of {name}s is fixed in this run. Restart the run with a different "
                "cluster.processes, with strategy.on_failure=heal, or with strategy=parameter_server."
            )
        return name
