"""The processes of another host, as the gang of the first host sees them: like its own, but started by an agent."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, final

from worldsize.core import Plan, Role
from worldsize.launch.first_cause import ProcessError
from worldsize.launch.lost_link import LossPolicy
from worldsize.launch.meeting import Door
from worldsize.launch.members import LostHostError, Member, size_of
from worldsize.net.agent_connection import AgentConnection, RemoteAgent
from worldsize.net.handshake import Message
from worldsize.record.run_directory import RunDirectory
from worldsize.world.processes import Beat, write_beat
from worldsize.world.roles import fewest, place_of, role_ranks

_logger = logging.getLogger(__name__)

_LAST = 10.0  # seconds that an agent may take to end a process; one that is silent longer than that is lost anyway


@final
class RemoteProcess:
    """A process on another host, which its agent starts and ends.

    ``order`` asks its agent for something.
    """

    def __init__(self, order: Callable[..., None]) -> None:
        self._order = order
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self._has_ended = threading.Event()
        self.sentinel = self._reader.fileno()
        self.exitcode: int | None = None
        self.pid: int | None = None

    def is_alive(self) -> bool:
        return not self._has_ended.is_set()

    def terminate(self) -> None:
        self._order(signal="SIGTERM")

    def kill(self) -> None:
        self._order(signal="SIGKILL")

    def join(self) -> None:
        """Wait until it has ended, or its agent fails to say so."""
        if not self._has_ended.wait(_LAST):
            self.end(-signal.SIGKILL)

    def end(self, code: int) -> None:
        """Record that it has ended."""
        if self.is_alive():
            self.exitcode = code
            self._has_ended.set()
            self._writer.send_bytes(b"!")  # not closed: a child that was forked meanwhile holds it open


@final
class RemotePipe:
    """The pipe to a process on another host, through its agent."""

    def __init__(self, tell: Callable[[Message], None]) -> None:
        self._tell = tell
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self.closed = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def close(self) -> None:
        self.closed = True

    def send_bytes(self, data: bytes) -> None:
        self._tell(json.loads(data))

    def recv_bytes(self, maxlength: int) -> bytes:
        return self._reader.recv_bytes(maxlength)

    def deliver(self, message: Message) -> None:
        """Let the gang receive what the process has said."""
        self._writer.send_bytes(json.dumps(message).encode())


@final
class RemoteHost:
    """Another host in one attempt: starts processes there, and keeps here what they say and leave.

    Args:
        agent: Its agent.
        attempt: Number of the attempt.
        run: The run folder, which all hosts share.
        folder: Private folder of the gang, for the heartbeats and errors that arrive.
        patience: Seconds of silence after which the host is lost.
        may_go_on: Returns whether the run goes on without this host.
    """

    def __init__(
        self,
        agent: RemoteAgent,
        attempt: int,
        run: RunDirectory,
        folder: Path,
        patience: float,
        may_go_on: Callable[[], bool],
    ) -> None:
        self.agent, self._attempt, self._may_go_on = agent, attempt, may_go_on
        self._run, self._folder, self._patience = run, folder, patience
        self._processes: dict[int, tuple[Member, RemoteProcess, RemotePipe]] = {}  # by global rank
        self.is_heard = agent.is_there  # neither this nor lost: it is being decided whether the run goes on
        self.lost_at = math.inf  # monotonic time
        self._listener = threading.Thread(target=self._listen, daemon=True, name=f"node {agent.rank}")

    @property
    def is_lost(self) -> bool:
        """Whether the run goes on without this host."""
        return self.lost_at < math.inf

    def start(self, roles: Mapping[str, Role], role: str, rank: int, starts: int) -> Member:
        """Start a process there; raise LostHostError if the host is lost."""
        if self.is_lost:
            raise LostHostError(f"the host {self.agent.host} is lost")
        number = role_ranks(roles)[role].start + rank
        process = RemoteProcess(lambda **order: self._order(rank=number, **order))
        pipe = RemotePipe(lambda message: self._order(rank=number, tell=message))
        error, beat = self._folder / f"error_{number}_{starts}", self._folder / f"beat_{number}"
        log = self._run.log(role, rank)
        member = Member(role, rank, process, log, error, beat, pipe, self.agent.host, size_of(log))
        self._processes[number] = member, process, pipe
        self._order(rank=number, role=role, role_rank=rank, starts=starts)
        return member

    def listen(self) -> None:
        """Handle the messages of the agent, in a thread."""
        self._listener.start()

    def dismiss(self) -> None:
        """End the attempt there, and wait until it has ended."""
        if not self.is_lost:
            self._order(abort=self._attempt)
        self._listener.join()

    def lose(self) -> None:
        """Count the host, and with it all of its processes, as lost."""
        if not self.is_lost:
            self.lost_at = time.monotonic() if self.agent.is_there else -math.inf
        self.agent.is_there = False  # nor in a later attempt
        self.agent.connection.close()  # an agent that still listens ends its processes
        cause = (
            f"the host {self.agent.host} (node {self.agent.rank}) has not answered for {self._patience:g} s, or is gone"
        )
        for member, process, _ in [*self._processes.values()]:
            if process.is_alive():
                self._end(member, process, 1, {"time_ns": 0, "traceback": cause, "is_of_host": True})

    def _order(self, **order: Any) -> None:
        with suppress(OSError):  # noticed when its messages are received
            self.agent.connection.send(**order)

    def _listen(self) -> None:
        if not self.agent.is_there:  # it was lost before this attempt
            self.lose()
            return
        try:
            while "ended" not in (message := self.agent.connection.receive()):
                self._take(message)
        except OSError:
            self.is_heard = False
            self._end_unless_leading()  # before the others go on
            self.lose()

    def _end_unless_leading(self) -> None:
        """End this host's processes if the run goes on without them; to know that may take its time."""
        if not self._may_go_on():
            _logger.error("the host %s is lost, and this one does not lead the run any more: it ends", self.agent.host)
            os.kill(os.getpid(), signal.SIGKILL)  # the workers die with it; the record is another's

    def _take(self, message: Message) -> None:
        if message.get("rank") not in self._processes:
            return
        member, process, pipe = self._processes[message["rank"]]
        match message:
            case {"said": dict(said)}:
                pipe.deliver(said)
            case {"pid": int(pid)}:
                process.pid = pid
            case {"beat": list(beat)}:
                write_beat(member.heartbeat, Beat(*beat))
            case {"code": int(code), "error": error}:
                self._end(member, process, code, error)

    def _end(self, member: Member, process: RemoteProcess, code: int, error: ProcessError | None) -> None:
        if error:
            with suppress(OSError):  # the gang has ended, and removed its folder
                draft = member.error.with_suffix(".draft")
                draft.write_text(json.dumps(error))
                draft.replace(member.error)
        process.end(code)


@final
class RemoteHosts:
    """All other hosts in one attempt, and which processes are theirs.

    Args:
        agents: Their agents, by node rank without the first; one that comes back replaces the one before.
        plan: The run.
        port: Port at which the members of the gang meet.
        folder: Private folder of the gang.
        patience: Seconds of silence after which a host is lost.
        door: Where hosts come back; None: none does.
        losses: Tells whether this host may go on without a lost one; if it may not, it ends.
    """

    def __init__(
        self,
        agents: list[RemoteAgent],
        plan: Plan,
        port: int,
        folder: Path,
        patience: float,
        door: Door | None,
        losses: LossPolicy,
    ) -> None:
        self._agents, self._plan, self._port = agents, plan, port
        self._folder, self._patience, self._door = folder, patience, door
        self._losses, self._is_over = losses, False
        self.connections: list[AgentConnection] = []
        self._hosts: dict[int, RemoteHost] = {}
        for agent in agents:
            self._include(agent)

    @property
    def returns(self) -> Sequence[Any]:
        """The file that is readable when a host has come back, for :meth:`welcome`; none if no host can."""
        return [self._door.arrivals.arrival] if self._door else []

    def welcome(self, present: Set[int]) -> Sequence[int]:
        """Let a host that has come back take part, if the loss of its processes has been noticed.

        ``present``: global ranks of the processes of the gang. Returns the ranks of those that are to be started there.
        """
        assert self._door is not None
        agent = self._door.arrivals.get()
        before, count = self._hosts[agent.rank], self._plan.cluster.processes_per_node
        if not before.is_lost:
            before.lose()
        ranks = range(agent.rank * count, (agent.rank + 1) * count)
        if not present.isdisjoint(ranks):
            self._door.arrivals.put(agent)
            return ()
        self._agents[agent.rank - 1] = agent
        self._include(agent)
        self._hosts[agent.rank].listen()
        _logger.warning("the host %s (node %d) has come back", agent.host, agent.rank)
        return ranks

    def _include(self, agent: RemoteAgent) -> None:
        with suppress(OSError):  # noticed when its messages are received
            agent.connection.send(attempt=self._plan.attempt, port=self._port)
        run = RunDirectory(self._plan.run_dir)
        may_go_on = partial(self._losses.may_lose, agent.connection, run, self._are_enough)
        host = RemoteHost(agent, self._plan.attempt, run, self._folder, self._patience, may_go_on)
        self._hosts[agent.rank] = host
        self.connections.append(agent.connection)

    def _are_enough(self) -> bool:
        """Return whether enough hosts are heard to go on, and not none of several: this host may be cut off then."""
        if self._is_over:
            return True
        heard = sum(host.is_heard for host in self._hosts.values())
        since = time.monotonic() - 2 * self._losses.patience  # those that were lost before are no sign
        is_alone = heard == 0 and sum(host.lost_at > since for host in self._hosts.values()) > 1
        return not is_alone and (1 + heard) * self._plan.cluster.processes_per_node >= fewest(self._plan.roles)

    def node_of(self, number: int) -> int:
        """Return the node of the process with this global rank, whether it lives or not."""
        return place_of(number, self._plan)[0]

    def host_of(self, number: int) -> str:
        """Return the name of the host of the process with this global rank."""
        node = self.node_of(number)
        return self._hosts[node].agent.host if node else socket.gethostname()

    def start(self, role: str, rank: int, starts: int) -> Member | None:
        """Start a process; None: it belongs to the first host. Raises LostHostError if its host is lost."""
        node = self.node_of(role_ranks(self._plan.roles)[role].start + rank)
        return self._hosts[node].start(self._plan.roles, role, rank, starts) if node else None

    def listen(self) -> None:
        """Handle the messages of all agents."""
        for host in self._hosts.values():
            host.listen()

    def dismiss(self) -> None:
        """End the attempt on all hosts, and wait until it has ended."""
        self._is_over = True
        for host in self._hosts.values():
            host.dismiss()
