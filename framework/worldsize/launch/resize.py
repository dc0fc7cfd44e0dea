"""Adds and removes processes of a running gang, if its strategy allows it."""

from __future__ import annotations

from typing import final

from worldsize.errors import ConfigError, WorldsizeError
from worldsize.launch.control import ListedProcess
from worldsize.launch.members import Members
from worldsize.launch.membership_server import MembershipServer


@final
class Resize:
    """Changes the number of processes of the last role, for ``worldsize workers``.

    ``server``: tells the processes of a gang that heals of each other.
    """

    def __init__(self, members: Members, server: MembershipServer | None = None) -> None:
        self._members, self._server = members, server

    def grow(self, count: int) -> list[str]:
        """Start ``count`` more processes; return their names.

        Raises:
            WorldsizeError: This host cannot start all of them; those named in the message keep running.
        """
        role, members = self._role(), self._members
        if self._server:
            self._server.check_room(count)
        taken = [member.rank for member in (*members.current, *members.lost) if member.role == role]
        first = max(max(taken) + 1, members.roles[role].processes)
        names: list[str] = []
        for rank in range(first, first + count):
            try:
                members.add(role, rank)
            except OSError as error:  # no more processes, or a full disk
                started = f"Started: {', '.join(names)}" if names else "None was started"
                raise WorldsizeError(f"{role} {rank} cannot be started: {error}. {started}.") from error
            names.append(f"{role} {rank}")
        return names

    def shrink(self, count: int) -> list[str]:
        """Ask the ``count`` newest processes to leave; return their names."""
        role = self._role()
        stay = [member for member in self._members.alive() if member not in self._members.leaving]
        alive = [member for member in stay if member.role == role]
        must_stay = self._members.roles[role].min_processes or (1 if self._server else 0)
        if len(alive) - count < must_stay:
            raise ConfigError(f"of {len(alive)} {role}s at least {must_stay} must stay. Remove fewer.")
        leaving = alive[len(alive) - count :]
        for member in leaving:
            if self._server:
                self._server.ask_to_leave(member)
            else:
                member.process.terminate()
        return [f"{member.role} {member.rank}" for member in leaving]

    def listed(self) -> list[ListedProcess]:
        """Describe each live process."""
        return [
            {"role": m.role, "rank": m.rank, "pid": m.process.pid, "step": m.beat.step if m.beat else None}
            for m in self._members.alive()
        ]

    def _role(self) -> str:
        name, role = list(self._members.roles.items())[-1]
        if role.restart == "gang":
            raise ConfigError(
                f"the {name}s of this run are a gang, whose size is fixed. Start it again with another "
                "cluster.processes, with strategy.on_failure=heal, or with strategy=parameter_server."
            )
        return name
