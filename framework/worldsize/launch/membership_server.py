"""Carries messages between the roster of a gang and its processes; adds and removes processes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import final

from worldsize.core import ConfigError, MembershipRecord
from worldsize.errors import WorldsizeError
from worldsize.launch.control import MOST, JobState, ListedProcess
from worldsize.launch.members import LostHostError, Member, Members
from worldsize.launch.remote import RemoteHosts
from worldsize.launch.roster import Roster
from worldsize.messages import last_error
from worldsize.world.membership import Message, Pipe, receive, send
from worldsize.world.roles import block_of, role_of, role_ranks, together_of

_logger = logging.getLogger(__name__)


@final
class MembershipServer:
    """The roster of one host's gang, and the pipes to its processes.

    ``members``: the processes, which have been started; ``patience``: seconds that one has to stop before it counts as
    hung, and is killed; ``most``: the logical ranks, of which each block of processes needs one; ``spares``: the last
    of the processes wait until others die; ``others``: the other hosts, which may come back.
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
        self._block = block_of(members.roles)
        self._members, self._most, self._others = members, most * self._block, others
        self._killed: list[Member] = []  # since they hung
        ranks = [self._rank(member) for member in members.current]
        node_of = others.node_of if others else lambda rank: 0
        first = tuple(ranks[: len(ranks) - spares])
        self._roster = Roster(first, self._tell, patience, self._block, together_of(members.roles), node_of)

    @property
    def records(self) -> Sequence[MembershipRecord]:
        """The memberships so far."""
        others = self._others
        if others is None:
            return self._roster.records
        return [{**each, "hosts": [*map(others.host_of, each["members"])]} for each in self._roster.records]

    def awaited(self) -> tuple[Sequence[Pipe], float | None]:
        """Kill the members that hang; return the pipes to wait for, and the seconds until the next one may hang."""
        seconds = self._roster.seconds_left
        for rank in self._roster.late():
            member = self._member(rank)
            if member is not None and member not in self._killed and member.process.is_alive():
                _logger.error("%s %d does not answer; going on without it", member.role, member.rank)
                member.process.kill()
                self._killed.append(member)
        pipes = [member.pipe for member in self._members.current if member.pipe is not None and not member.pipe.closed]
        returns = self._others.returns if self._others and not self._members.ended else []
        return [*pipes, *returns], seconds or None  # 0: they have been killed, and their sentinels tell when they end

    def answer(self, ready: Pipe) -> None:
        """Read a message from one of these pipes."""
        if self._others and ready in self._others.returns:
            self._take_in(self._others)
            return
        member = next((each for each in self._members.current if each.pipe is ready), None)
        try:
            message = receive(ready)
        except (OSError, EOFError, ValueError):  # the process has ended, which its sentinel tells
            ready.close()
            return
        if member is not None:  # else it has died since
            self._roster.take(self._rank(member), message)

    def note_end(self, member: Member) -> None:
        """Record that a process has ended, once the members know what that means for the gang."""
        if member in self._members.lost:
            self._roster.lose(self._rank(member), last_error(member.ending().cause))
        else:
            self._roster.has_ended(self._rank(member))

    def make_room(self, count: int, training: Sequence[Member]) -> None:
        """Let ``count`` more than ``training`` train; raise ConfigError if some would have no logical rank."""
        wanted = len(training)
        if wanted + count > self._most:
            ranks = self._most // self._block
            raise ConfigError(
                f"the run has {ranks} logical ranks, which {self._most} processes can share at most; {wanted} "
                f"train. Add at most {self._most - wanted}, or start a run with more logical_ranks."
            )
        self._roster.target = wanted + count

    def note_request(self, member: Member, asked: str) -> None:
        """Record who has asked for a process to join, or to leave."""
        self._roster.asked[self._rank(member)] = asked

    def training(self, alive: Sequence[Member]) -> list[Member]:
        """Return those of ``alive`` that train or are to join, without spares and those that are about to leave."""
        here = [each for each in alive if each not in self._members.leaving]
        members = [each for each in here if self._rank(each) in self._roster.members]
        coming = [each for each in here if each not in members]
        return [*members, *coming[: max(0, self._roster.target - len(members))]]

    def ask_to_leave(self, member: Member) -> None:
        """Let the others go on without ``member``, which then ends."""
        self._members.leaving.append(member)
        self._roster.leave(self._rank(member))

    def _take_in(self, others: RemoteHosts) -> None:
        """Start the processes of a host that has come back, which join between two steps."""
        for rank in others.welcome({self._rank(member) for member in self._members.current}):
            try:
                self._members.add(*role_of(rank, self._members.roles))
            except OSError as error:
                _logger.error("%s", error)

    def _rank(self, member: Member) -> int:
        return role_ranks(self._members.roles)[member.role].start + member.rank

    def _member(self, rank: int) -> Member | None:
        return next((each for each in self._members.current if self._rank(each) == rank), None)

    def _tell(self, rank: int, message: Message) -> None:
        member = self._member(rank)
        if member is not None and member.pipe is not None:
            with suppress(OSError):  # it has ended, which its sentinel tells
                send(member.pipe, message)


@final
class Resize:
    """Changes the number of processes of the last role, for ``worldsize workers`` and policies.

    ``server``: tells the processes of a gang that heals of each other.
    """

    def __init__(self, members: Members, server: MembershipServer | None = None) -> None:
        self._members, self._server = members, server

    def grow(self, count: int, *, asked: str = "workers") -> list[str]:
        """Start ``count`` more processes, which ``asked`` wants; return their names.

        Raises:
            WorldsizeError: This host cannot start all of them; those named in the message keep running.
        """
        role, members = self._role(), self._members
        if self._server:
            self._server.make_room(count, self._training())
        taken = [member.rank for member in (*members.current, *members.lost) if member.role == role]
        first = max(max(taken) + 1, members.roles[role].processes)
        names, rank = list[str](), first - 1
        while len(names) < count:
            rank += 1
            try:
                members.add(role, rank)
            except LostHostError:
                continue  # the first host, whose turn comes too, is not lost
            except OSError as error:  # no more processes, or a full disk
                started = f"Started: {', '.join(names)}" if names else "None was started"
                raise WorldsizeError(f"{role} {rank} cannot be started: {error}. {started}.") from error
            if self._server:
                self._server.note_request(members.current[-1], asked)
            names.append(f"{role} {rank}")
        return names

    def shrink(self, count: int, *, asked: str = "workers") -> list[str]:
        """Ask the ``count`` newest processes to leave, as ``asked`` wants; return their names."""
        role, alive = self._role(), self._training()
        must_stay = self._members.roles[role].min_processes or (1 if self._server else 0)
        if len(alive) - count < must_stay:
            raise ConfigError(f"of {len(alive)} {role}s at least {must_stay} must stay. Remove fewer.")
        leaving = alive[len(alive) - count :]
        for member in leaving:
            if self._server:
                self._server.note_request(member, asked)
                self._server.ask_to_leave(member)
            else:
                member.process.terminate()
        return [f"{member.role} {member.rank}" for member in leaving]

    def resize(self, processes: int) -> list[str]:
        """Let ``processes`` train, as a policy wants; return the names of those that start or are asked to leave."""
        more = processes - len(self._training())
        if more == 0 or self._members.ended:
            return []
        change = self.grow if more > 0 else self.shrink
        return change(min(abs(more), MOST), asked="autoscale")

    def state(self) -> JobState:
        """Describe the job for a policy."""
        steps = [member.beat.step for member in self._members.alive() if member.beat]
        return {"step": max(steps, default=0), "processes": len(self._training())}

    def listed(self) -> list[ListedProcess]:
        """Describe each live process."""
        alive = self._members.alive()
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
        """Return the processes that train or are about to."""
        role = self._role()
        alive = [member for member in self._members.alive() if member.role == role]
        return self._server.training(alive) if self._server else alive

    def _role(self) -> str:
        name, role = list(self._members.roles.items())[-1]
        if role.restart == "gang":
            raise ConfigError(
                f"the {name}s of this run are a gang, whose size is fixed. Start it again with another "
                "cluster.processes, with strategy.on_failure=heal, or with strategy=parameter_server."
            )
        return name
