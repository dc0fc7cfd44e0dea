"""Connects the agents of a run's hosts, and tests whether the hosts can reach each other."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Self, final

from worldsize.errors import WorldsizeError
from worldsize.messages import CONFIG_ERROR
from worldsize.net.agent_connection import (
    Admission,
    AgentConnection,
    HeartbeatSender,
    Mailbox,
    RemoteAgent,
    receive_exactly,
    receive_line,
)
from worldsize.net.credentials import RunKey
from worldsize.net.handshake import Message, MessageSeal, NotOfThisRunError, Turn, authenticate_leader
from worldsize.world.environments import Node
from worldsize.world.topology import address_towards

_logger = logging.getLogger(__name__)

_LOOK = 0.2  # seconds between two checks of whether the door is closed
_RETRY = 0.1  # seconds between two attempts to connect
_CONNECT = 5.0  # timeout of a connection attempt in seconds
_HANDSHAKE = 10.0  # timeout of a handshake in seconds
_BACKLOG = 128


def gather_agents(
    node: Node, port: int, key: RunKey, *, patience: float, silence: float
) -> list[tuple[RemoteAgent, Message]]:
    """Wait for all other hosts; return their agents and facts, sorted by node rank.

    They have ``patience`` seconds to connect, and are lost after ``silence`` seconds without a heartbeat.

    Raises:
        WorldsizeError: a host did not connect in time, or the port is in use.
    """
    agents = arrivals(node, port, key, patience=patience, silence=silence)
    if missing := sorted({*node.expected} - {agent.rank for agent, _ in agents}):
        for agent, _ in agents:
            agent.connection.close()
        raise WorldsizeError(
            f"nodes {missing} of {node.count} did not connect within {patience:g} s (cluster.timeout). Check their "
            f"logs, and that they can reach {node.first} at port {port}."
        )
    return agents


def arrivals(
    node: Node, port: int, key: RunKey, *, patience: float, silence: float
) -> list[tuple[RemoteAgent, Message]]:
    """Wait like :func:`gather_agents`, but return only the hosts that connected in time.

    ``patience`` and ``silence`` are in seconds. Raises WorldsizeError if the port is in use.
    """
    ranks, expected = range(1, node.count), {*node.expected}
    agents: dict[int, tuple[RemoteAgent, Message]] = {}
    connections: list[AgentConnection] = []
    deadline = time.monotonic() + (patience if expected else 0.0)
    beats = HeartbeatSender(connections, silence)  # keeps agents that connected early from timing out
    with _listening(node, port) as listener, beats, Admission(listener, key, ranks, silence=silence) as admission:
        for agent, facts in admission.arrivals(deadline=deadline):
            if agent.rank in agents:  # the agent reconnected, so its old connection is obsolete
                agents[agent.rank][0].connection.close()
            agents[agent.rank] = agent, facts
            connections.append(agent.connection)
            if expected <= agents.keys():
                break
    return [agents[rank] for rank in sorted(agents)]


@final
class Door:
    """Context manager that admits returning hosts in a thread during a run.

    ``check`` gets a host's facts, and raises WorldsizeError to refuse it. Other arguments: see :func:`gather_agents`.
    """

    def __init__(self, node: Node, port: int, key: RunKey, check: Callable[[Message], None], *, silence: float) -> None:
        self.arrivals: Mailbox[RemoteAgent] = Mailbox()
        self._node, self._port, self._key, self._check, self._silence = node, port, key, check, silence
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._admit_hosts, daemon=True, name="door")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed.set()
        self._thread.join()

    def _admit_hosts(self) -> None:
        expected = range(1, self._node.count)
        try:
            listener = _listening(self._node, self._port)
        except WorldsizeError as error:
            _logger.error("lost hosts cannot rejoin: %s", error)
            return
        with listener, Admission(listener, self._key, expected, silence=self._silence) as admission:
            while not self._is_closed.is_set():
                for agent, facts in admission.arrivals(deadline=time.monotonic() + _LOOK):
                    try:
                        self._check(facts)
                    except WorldsizeError as error:
                        _logger.error("%s", error)
                        agent.announce_end(CONFIG_ERROR)
                    else:
                        self.arrivals.put(agent)


def _listening(node: Node, port: int) -> socket.socket:
    try:
        backlog = max(_BACKLOG, node.count)
        return socket.create_server((address_towards(node.first or ""), port), backlog=backlog)
    except OSError as error:
        raise WorldsizeError(
            f"failed to open the rendezvous port {port} on {node.first}: {error}. Set cluster.port to a free port."
        ) from error


def reach_first_host(
    node: Node, port: int, key: RunKey, *, patience: float, silence: float, facts: Message
) -> AgentConnection:
    """Connect this host to the first host, and send it ``facts``.

    For the other arguments see :func:`gather_agents`.

    Raises:
        WorldsizeError: the first host does not answer, or fails to authenticate as this run's first host.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return _connect_agent(node, port, key, silence, facts)
        except NotOfThisRunError as error:
            raise WorldsizeError(f"{node.first}:{port} does not belong to this run: {error}.") from error
        except OSError as error:
            if time.monotonic() > deadline:
                raise WorldsizeError(
                    f"failed to connect to the first node, {node.first}, at port {port}: {error}. "
                    "Check its log, and the firewalls between the two hosts."
                ) from error
            time.sleep(_RETRY)


def _connect_agent(node: Node, port: int, key: RunKey, silence: float, facts: Message) -> AgentConnection:
    connection = socket.create_connection((node.first, port), timeout=_CONNECT)
    try:
        seal = _run_handshake(authenticate_leader(key, node.rank), connection)
        agent = AgentConnection(connection, seal, silence)
        agent.send(**facts)
        if "admitted" not in agent.receive():
            raise NotOfThisRunError("expected an admission in the first message")
        return agent
    except OSError:
        connection.close()
        raise


def _run_handshake(handshake: Generator[Turn, bytes, MessageSeal], connection: socket.socket) -> MessageSeal:
    """Send and receive the bytes that ``handshake`` requests, and return the handshake's result."""
    deadline = time.monotonic() + _HANDSHAKE
    turn = next(handshake)
    while True:
        connection.sendall(turn.send)
        received = receive_exactly(connection, turn.receive, deadline=deadline)
        try:
            turn = handshake.send(received)
        except StopIteration as done:
            seal: MessageSeal = done.value
            return seal


_PATIENCE = 3.0  # timeout of a probe in seconds
_AT_ONCE = 32  # maximum concurrent probes
_LONGEST = 32  # maximum bytes of a probe's answer


@final
class PortProbe:
    """An open port at ``address`` that sends this host's node rank to every client.

    Raises:
        OSError: this host does not have the address.
    """

    def __init__(self, address: str, node: int) -> None:
        self._listener = socket.create_server((address, 0), backlog=_AT_ONCE)
        self._node = node
        self._thread = threading.Thread(target=self._serve_clients, daemon=True, name="probe")
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which must end before this process forks
        self._thread.join()
        self._listener.close()

    def _serve_clients(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    connection.settimeout(_PATIENCE)
                    connection.sendall(f"{self._node}\n".encode())


def probe_port(address: str, port: int, node: int) -> str | None:
    """Return the reason why the port of ``node`` is unreachable; None if it is reachable."""
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE) as connection:
            line = receive_line(connection, at_most=_LONGEST, deadline=time.monotonic() + _PATIENCE)
    except OSError as error:
        return str(error)
    said = line.decode("latin-1").strip().encode("unicode_escape").decode()  # may come from a different program
    return (
        None if said == str(node) else f"a different process is listening on this port (received {said or 'nothing'})"
    )


def probe_all(probes: Sequence[Mapping[str, int | str]], own: int) -> dict[int, str]:
    """Probe the other nodes from this one, node ``own``; map unreachable nodes to the reasons."""
    others = [(str(each["address"]), int(each["port"]), int(each["node"])) for each in probes if each["node"] != own]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        refusals = pool.map(lambda other: probe_port(*other), others)
        return {node: why for (_, _, node), why in zip(others, refusals, strict=True) if why}
