"""Proxies that let the first host's gang treat processes on other hosts like its own."""

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
from worldsize.healing.lost_link import LossPolicy
from worldsize.launch.first_cause import ProcessError
from worldsize.launch.meeting import Door
from worldsize.launch.members import LostHostError, Member, read_log_size
from worldsize.net.agent_connection import AgentConnection, RemoteAgent
from worldsize.net.handshake import Message
from worldsize.record.run_directory import RunDirectory
from worldsize.world.processes import Beat, write_beat
from worldsize.world.roles import get_min_processes, locate_rank, role_ranks

_logger = logging.getLogger(__name__)

_LAST = 10.0  # seconds for an agent to report the exit of a process; a silent agent is soon lost anyway


@final
class RemoteProcess:
    """Proxy for a process on a remote host.

    ``order`` sends an order to that host's agent.
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
        """Wait until the agent reports that the process exited; after a timeout, consider it killed."""
        if not self._has_ended.wait(_LAST):
            self.record_exit(-signal.SIGKILL)

    def record_exit(self, code: int) -> None:
        """Record that the process exited with ``code``."""
        if self.is_alive():
            self.exitcode = code
            self._has_ended.set()
            self._writer.send_bytes(b"!")  # closing would not suffice: children forked meanwhile hold it open


@final
class RemotePipe:
    """Pipe between the gang and a remote process, relayed by the host's agent."""

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

    def deliver_message(self, message: Message) -> None:
        """Make a message from the process readable for the gang."""
        self._writer.send_bytes(json.dumps(message).encode())


@final
class RemoteHost:
    """Proxy for a remote host in one attempt: starts processes, stores progress and errors.

    Args:
        agent: The host's agent.
        attempt: Number of the attempt.
        run: The run folder, shared by all hosts.
        folder: Private folder of the gang, for received heartbeats and errors.
        patience: Seconds of silence after which the host is lost.
        may_go_on: Returns whether the run may continue without this host.
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
        # False once contact is lost; is_lost follows after the decision to continue without it
        self.is_heard = agent.is_there
        self.lost_at = math.inf  # monotonic time
        self._listener = threading.Thread(target=self._receive_reports, daemon=True, name=f"node {agent.rank}")

    @property
    def is_lost(self) -> bool:
        """Whether this host was declared lost, so that the run continues without it."""
        return self.lost_at < math.inf

    def start_process(self, roles: Mapping[str, Role], role: str, rank: int, starts: int) -> Member:
        """Start a process on this host; raise LostHostError if the host is lost."""
        if self.is_lost:
            raise LostHostError(f"the host {self.agent.host} is lost")
        number = role_ranks(roles)[role].start + rank
        process = RemoteProcess(lambda **order: self._send_order(rank=number, **order))
        pipe = RemotePipe(lambda message: self._send_order(rank=number, tell=message))
        error, beat = self._folder / f"error_{number}_{starts}", self._folder / f"beat_{number}"
        log = self._run.get_log_file(role, rank)
        member = Member(role, rank, process, log, error, beat, pipe, self.agent.host, read_log_size(log))
        self._processes[number] = member, process, pipe
        self._send_order(rank=number, role=role, role_rank=rank, starts=starts)
        return member

    def start_listener(self) -> None:
        """Start a thread that handles the agent's messages."""
        self._listener.start()

    def end_attempt(self) -> None:
        """End the attempt on this host, and wait until it has ended."""
        if not self.is_lost:
            self._send_order(abort=self._attempt)
        self._listener.join()

    def mark_lost(self) -> None:
        """Mark the host and all its processes as lost."""
        if not self.is_lost:
            self.lost_at = time.monotonic() if self.agent.is_there else -math.inf
        self.agent.is_there = False  # applies to later attempts, too
        self.agent.connection.close()  # makes an agent that is still connected kill its processes
        name = f"{self.agent.host} (node {self.agent.rank})"
        cause = f"the host {name} did not respond for {self._patience:g} s or disconnected"
        for member, process, _ in [*self._processes.values()]:
            if process.is_alive():
                self._end_process(member, process, 1, {"time_ns": 0, "traceback": cause, "is_of_host": True})

    def _send_order(self, **order: Any) -> None:
        with suppress(OSError):  # the loss is noticed when receiving from this host
            self.agent.connection.send(**order)

    def _receive_reports(self) -> None:
        if not self.agent.is_there:  # lost before this attempt
            self.mark_lost()
            return
        try:
            while "ended" not in (message := self.agent.connection.receive()):
                self._apply_message(message)
        except OSError:
            self.is_heard = False
            self._end_unless_leading()  # before the remaining hosts continue
            self.mark_lost()

    def _end_unless_leading(self) -> None:
        """Kill this process and its workers if it no longer leads the run; may take a while."""
        if not self._may_go_on():
            _logger.error("the host %s is lost, and this host no longer leads the run; exiting", self.agent.host)
            os.kill(os.getpid(), signal.SIGKILL)  # kills the workers, too; a different host owns the record

    def _apply_message(self, message: Message) -> None:
        if message.get("rank") not in self._processes:
            return
        member, process, pipe = self._processes[message["rank"]]
        match message:
            case {"said": dict(said)}:
                pipe.deliver_message(said)
            case {"pid": int(pid)}:
                process.pid = pid
            case {"beat": list(beat)}:
                write_beat(member.heartbeat, Beat(*beat))
            case {"code": int(code), "error": error}:
                self._end_process(member, process, code, error)

    def _end_process(self, member: Member, process: RemoteProcess, code: int, error: ProcessError | None) -> None:
        if error:
            with suppress(OSError):  # the gang has ended and removed its folder
                draft = member.error.with_suffix(".draft")
                draft.write_text(json.dumps(error))
                draft.replace(member.error)
        process.record_exit(code)


@final
class RemoteHosts:
    """All other hosts in one attempt, with the assignment of processes to hosts.

    Args:
        agents: Agents of the other hosts, sorted by node rank; a returned host's agent replaces its former one.
        plan: The plan of the run.
        port: Port of the gang's rendezvous store.
        folder: Private folder of the gang.
        patience: Seconds of silence after which a host is lost.
        door: Admits returning hosts; None if hosts cannot return.
        losses: Decides whether this host may continue without a lost one; if not, this process kills itself.
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
            self._include_host(agent)

    @property
    def returns(self) -> Sequence[Any]:
        """File that becomes readable when a host returns; empty if hosts cannot return."""
        return [self._door.arrivals.arrival] if self._door else []

    def admit_host(self, present: Set[int]) -> Sequence[int]:
        """Include a returned host if its former processes are gone; otherwise queue it again.

        ``present`` has the global ranks of the gang's processes. Returns the ranks to start on the returned host.
        """
        assert self._door is not None
        agent = self._door.arrivals.get()
        before, count = self._hosts[agent.rank], self._plan.cluster.processes_per_node
        if not before.is_lost:
            before.mark_lost()
        ranks = range(agent.rank * count, (agent.rank + 1) * count)
        if not present.isdisjoint(ranks):
            self._door.arrivals.put(agent)
            return ()
        self._agents[agent.rank - 1] = agent
        self._include_host(agent)
        self._hosts[agent.rank].start_listener()
        _logger.warning("the host %s (node %d) has rejoined", agent.host, agent.rank)
        return ranks

    def _include_host(self, agent: RemoteAgent) -> None:
        with suppress(OSError):  # the loss is noticed when receiving from this host
            agent.connection.send(attempt=self._plan.attempt, port=self._port)
        run = RunDirectory(self._plan.run_dir)
        may_go_on = partial(self._losses.may_lose, agent.connection, run, self._are_enough)
        host = RemoteHost(agent, self._plan.attempt, run, self._folder, self._patience, may_go_on)
        self._hosts[agent.rank] = host
        self.connections.append(agent.connection)

    def _are_enough(self) -> bool:
        """Return whether enough hosts respond; False if this host may be disconnected itself."""
        if self._is_over:
            return True
        heard = sum(host.is_heard for host in self._hosts.values())
        since = time.monotonic() - 2 * self._losses.patience  # only recent losses suggest a disconnection
        is_alone = heard == 0 and sum(host.lost_at > since for host in self._hosts.values()) > 1
        return not is_alone and (1 + heard) * self._plan.cluster.processes_per_node >= get_min_processes(
            self._plan.roles
        )

    def find_node(self, number: int) -> int:
        """Return the node of the process with this global rank, dead or alive."""
        return locate_rank(number, self._plan)[0]

    def find_host_name(self, number: int) -> str:
        """Return the host name for the process with this global rank."""
        node = self.find_node(number)
        return self._hosts[node].agent.host if node else socket.gethostname()

    def start_remote_process(self, role: str, rank: int, starts: int) -> Member | None:
        """Start a remote process; return None if it belongs to the first host. Raises LostHostError."""
        node = self.find_node(role_ranks(self._plan.roles)[role].start + rank)
        return self._hosts[node].start_process(self._plan.roles, role, rank, starts) if node else None

    def start_listeners(self) -> None:
        """Start handling the messages of all agents."""
        for host in self._hosts.values():
            host.start_listener()

    def end_attempts(self) -> None:
        """End the attempt on all other hosts, and wait until it has ended."""
        self._is_over = True
        for host in self._hosts.values():
            host.end_attempt()
