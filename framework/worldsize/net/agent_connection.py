"""Connects two authenticated agents of a run, with heartbeats."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, final

from worldsize.core import Outcome
from worldsize.net.bounded_io import receive_exactly
from worldsize.net.handshake import LENGTH, Message, MessageSeal


@final
class AgentConnection:
    """Exchanges messages with another agent; each send and receive fails after ``patience`` seconds of silence.

    Args:
        connection: A connected socket after the handshake.
        seal: The seal that the handshake returned.
        patience: Seconds for one complete message.
    """

    def __init__(self, connection: socket.socket, seal: MessageSeal, patience: float) -> None:
        connection.settimeout(patience)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._seal, self._patience = connection, seal, patience
        self._sending = threading.Lock()

    @property
    def name(self) -> str:
        """The name of this connection: the same at both ends, and that of no other one."""
        return self._seal.name

    def send(self, **message: Any) -> None:
        """Send one message; an empty one is a heartbeat. Raise OSError if that fails."""
        with self._sending:
            self._connection.sendall(self._seal.seal(message))

    def receive(self) -> Message:
        """Return the next message that is not a heartbeat; raise OSError if none arrives or one is not authentic."""
        while True:
            deadline = time.monotonic() + self._patience
            head = receive_exactly(self._connection, LENGTH.size, deadline=deadline)
            body = receive_exactly(self._connection, self._seal.bytes_after(head), deadline=deadline)
            if message := self._seal.open(body):
                return message

    def close(self) -> None:
        """End the connection, also for processes that were forked meanwhile and hold it open."""
        with suppress(OSError):  # it has ended
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@final
class HeartbeatSender:
    """Sends heartbeats over ``connections`` from its own thread, while its context is open."""

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
                with suppress(OSError):  # the receiving thread of that connection detects it
                    connection.send()


@final
@dataclass
class RemoteAgent:
    """The agent of another host, as seen by the first host."""

    rank: int
    host: str
    connection: AgentConnection
    outcome: Outcome | None = None
    is_there: bool = True

    @staticmethod
    def absent(rank: int, host: str) -> RemoteAgent:
        """Stand for the agent of a host that is not there: nothing can be sent to it, and nothing comes."""
        connection = AgentConnection(socket.socket(), MessageSeal(sending=b"", receiving=b""), 1.0)
        connection.close()
        return RemoteAgent(rank, host, connection, is_there=False)

    def announce_end(self, code: int) -> None:
        """Tell the other agent that the run has ended with the exit code ``code``."""
        with suppress(OSError):
            self.connection.send(over=code)
