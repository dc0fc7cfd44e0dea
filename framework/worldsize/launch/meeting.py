"""The agents of a run's hosts find each other and exchange messages.

They speak JSON over one TCP connection each with the agent of the first host, authenticated both ways by a key that the
members of the run have (HMAC challenge of multiprocessing.connection; nothing is unpickled). Both sides send
heartbeats; an agent that has not been heard of for some time is lost.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any, final

from worldsize.core import ConfigError, Outcome
from worldsize.errors import WorldsizeError
from worldsize.world.environments import Node
from worldsize.world.interfaces import address_towards

_logger = logging.getLogger(__name__)

_RETRY = 0.1  # seconds
_LONGEST = 1 << 20  # bytes of a message
Message = Mapping[str, Any]


def write_key(run_dir: Path) -> None:
    """Give the run's members a key, if they have none yet; only their user may read it."""
    path = run_dir / "agents.key"
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_hex(32))


def read_key(run_dir: Path) -> bytes:
    """Return the key that :func:`write_key` made.

    Raises:
        ConfigError: the run folder has none, or is not seen here.
    """
    try:
        return (run_dir / "agents.key").read_bytes()
    except OSError as error:
        raise ConfigError(f"the run's key cannot be read: {error}. All hosts need the run folder {run_dir}.") from error


@final
class AgentConnection:
    """A connection between two agents. Each send and receive fails after ``patience`` seconds of silence."""

    def __init__(self, connection: socket.socket, patience: float) -> None:
        bound = struct.pack("ll", int(patience), int(patience % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, bound)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = Connection(connection.detach())
        self._sending = threading.Lock()

    def challenge(self, key: bytes) -> None:
        """Let the other agent prove that it has the key, then prove it to that one.

        Raises:
            AuthenticationError: it has another key.
            OSError: it is gone.
        """
        deliver_challenge(self._connection, key)
        answer_challenge(self._connection, key)

    def answer(self, key: bytes) -> None:
        """Do the same as :meth:`challenge`, in the order of the agent that has connected."""
        answer_challenge(self._connection, key)
        deliver_challenge(self._connection, key)

    def send(self, **message: Any) -> None:
        """Send one message; an empty one is a heartbeat. Raises OSError."""
        with self._sending:
            self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Message:
        """Return the next message that is no heartbeat. Raises OSError or EOFError."""
        while True:
            message: Message = json.loads(self._connection.recv_bytes(_LONGEST))
            if message:
                return message

    def close(self) -> None:
        self._connection.close()


@final
class HeartbeatSender:
    """Sends heartbeats over ``connections`` from a thread of its own, while its context is open."""

    def __init__(self, connections: Sequence[AgentConnection], patience: float) -> None:
        self._connections, self._interval = connections, patience / 4
        self._ended = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._beat, daemon=True, name="heartbeat").start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _beat(self) -> None:
        while not self._ended.wait(self._interval):
            for connection in self._connections:
                with suppress(OSError):  # whoever listens on that connection notices
                    connection.send()


@final
@dataclass
class RemoteAgent:
    """The agent of another host, as the first one sees it."""

    rank: int
    host: str
    connection: AgentConnection
    outcome: Outcome | None = None

    def announce_end(self, code: int) -> None:
        """Tell it that the run has ended with the exit code ``code``."""
        with suppress(OSError):
            self.connection.send(over=code)


def gather(node: Node, port: int, key: bytes, *, patience: float, silence: float) -> list[tuple[RemoteAgent, Message]]:
    """Wait at the first host for the others; return them in their order, each with the facts of its host.

    ``patience``: seconds that they have to come; ``silence``: after which one is lost.

    Raises:
        WorldsizeError: one did not come in time, or the port is taken.
    """
    agents = arrivals(node, port, key, patience=patience, silence=silence)
    if missing := sorted({*range(1, node.count)} - {agent.rank for agent, _ in agents}):
        raise WorldsizeError(
            f"nodes {missing} of {node.count} did not come within {patience:g} s. Look at their logs, and "
            f"whether they reach {node.first} at port {port}; cluster.timeout is how long is waited."
        )
    return agents


def arrivals(
    node: Node, port: int, key: bytes, *, patience: float, silence: float
) -> list[tuple[RemoteAgent, Message]]:
    """Do as :func:`gather`, but return whoever came in time. Raises WorldsizeError if the port is taken."""
    agents: dict[int, tuple[RemoteAgent, Message]] = {}
    connections: list[AgentConnection] = []
    deadline = time.monotonic() + patience
    beats = HeartbeatSender(connections, silence)  # an agent that comes early hears that this host lives
    with _listening(node, port) as listener, beats:
        while len(agents) < node.count - 1 and time.monotonic() < deadline:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            with suppress(OSError, EOFError, ValueError, KeyError):
                accepted, address = listener.accept()
                connection = _authenticated(accepted, key, address[0], silence)
                facts = connection.receive()
                agents[facts["node"]] = RemoteAgent(facts["node"], facts["host"], connection), facts
                connections.append(connection)
    return [agents[rank] for rank in sorted(agents)]


def _authenticated(accepted: socket.socket, key: bytes, address: str, silence: float) -> AgentConnection:
    accepted.settimeout(None)
    connection = AgentConnection(accepted, silence)
    try:
        connection.challenge(key)
    except AuthenticationError as error:
        _logger.info("refused %s: %s", address, error)
        raise OSError("no member of this run") from error
    return connection


def _listening(node: Node, port: int) -> socket.socket:
    try:
        return socket.create_server((address_towards(node.first or ""), port), backlog=node.count)
    except OSError as error:
        raise WorldsizeError(
            f"port {port} at {node.first}, where the nodes are to meet, cannot be opened: {error}. "
            "Set cluster.port to one that is free."
        ) from error


def reach(node: Node, port: int, key: bytes, *, patience: float, silence: float, facts: Message) -> AgentConnection:
    """Connect from another host to the first. ``patience`` and ``silence`` as in :func:`gather`.

    Raises:
        WorldsizeError: it does not answer, or has another key.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            connected = socket.create_connection((node.first, port), timeout=5.0)
            connected.settimeout(None)
            connection = AgentConnection(connected, silence)
            connection.answer(key)
            connection.send(**facts)
            return connection
        except AuthenticationError as error:
            raise WorldsizeError(f"{node.first}:{port} is not of this run: {error}.") from error
        except (OSError, EOFError) as error:
            if time.monotonic() > deadline:
                raise WorldsizeError(
                    f"the first node, {node.first}, does not answer at port {port}: {error}. "
                    "Look at its log, and at what lies between the two."
                ) from error
            time.sleep(_RETRY)
