"""Adds and removes processes of a running gang, if its strategy allows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from worldsize.errors import ConfigError, WorldsizeError
from worldsize.launch.control import MOST, JobState, ListedProcess
from worldsize.launch.members import Member, Members
from worldsize.launch.membership_server import MembershipServer


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
        names: list[str] = []
        for rank in range(first, first + count):
            try:
                members.add(role, rank)
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
