"""A connection between two authenticated agents of a run, and the heartbeats on it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from worldsize.core import Outcome
from worldsize.launch.bounded_io import receive_exactly
from worldsize.launch.handshake import LENGTH, Message, MessageSeal


@final
class AgentConnection:
    """Exchanges messages with another agent; each send and receive fails after ``patience`` seconds of silence.

    Args:
        connection: A connected socket, over which a handshake has been made.
        seal: What the handshake has given.
        patience: Seconds for one whole message.
    """

    def __init__(self, connection: socket.socket, seal: MessageSeal, patience: float) -> None:
        connection.settimeout(patience)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._seal, self._patience = connection, seal, patience
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send one message; an empty one is a heartbeat. Raises OSError."""
        with self._sending:
            self._connection.sendall(self._seal.seal(message))

    def receive(self) -> Message:
        """Return the next message that is no heartbeat. Raises OSError if none comes, or one that is not the peer's."""
        while True:
            deadline = time.monotonic() + self._patience
            head = receive_exactly(self._connection, LENGTH.size, deadline=deadline)
            body = receive_exactly(self._connection, self._seal.bytes_after(head), deadline=deadline)
            if message := self._seal.open(body):
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
        """Tell the other agent that the run has ended with the exit code ``code``."""
        with suppress(OSError):
            self.connection.send(over=code)
