"""Admits host agents at a port open to the network, and connects them.

Connections of authenticated agents carry heartbeats. Reads from untrusted peers are limited in bytes and time, and the
log of refusals is sampled. :class:`Mailbox` is a queue between threads with a file descriptor, so that an event loop
can wait for it. This module does not import torch.
"""

from __future__ import annotations

import logging
import math
import select
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar, final

from worldsize.core import Outcome
from worldsize.net.credentials import RunKey
from worldsize.net.handshake import LENGTH, Admitted, Message, MessageSeal, Turn, authenticate_follower

_logger = logging.getLogger(__name__)
T = TypeVar("T")

_SECONDS = 10.0  # seconds for the handshake including the host's facts
_AT_ONCE = 256  # maximum pending connections, or two per node if that is more; a new one replaces the oldest
_PAUSE = 0.1  # seconds to wait after accept() failed, such as for lack of file descriptors


@final
class _Candidate:
    """A non-blocking connection that is not authenticated yet."""

    def __init__(self, connection: socket.socket, address: str, key: RunKey, ranks: range) -> None:
        connection.setblocking(False)
        self.connection, self.address = connection, address
        self.deadline = time.monotonic() + _SECONDS
        self._handshake = authenticate_follower(key, ranks)
        self._turn: Turn = next(self._handshake)
        self._received = bytearray()

    def advance_handshake(self) -> Admitted | None:
        """Process received bytes; return the agent once it is authenticated, before that None.

        Raises:
            OSError: the peer is refused or lost.
        """
        with suppress(BlockingIOError):
            data = self.connection.recv(self._turn.receive - len(self._received))
            if not data:
                raise ConnectionResetError("disconnected before authentication")
            self._received += data
        if len(self._received) < self._turn.receive:
            return None
        try:
            self._turn = self._handshake.send(bytes(self._received))
        except StopIteration as done:
            admitted: Admitted = done.value
            return admitted
        self._received.clear()
        self.connection.sendall(self._turn.send)  # at most 64 bytes into an empty buffer
        return None


@final
class Admission:
    """Admits agents concurrently, so that a silent or unknown peer does not delay others.

    Pending connections are closed when the context exits.

    Args:
        listener: Listening socket on the first host.
        key: Key that an agent must prove to have.
        ranks: Node ranks of the expected agents.
        silence: Seconds without a heartbeat after which an admitted agent counts as lost.
    """

    def __init__(self, listener: socket.socket, key: RunKey, ranks: range, *, silence: float) -> None:
        self._listener, self._key, self._ranks, self._silence = listener, key, ranks, silence
        self._candidates: dict[int, _Candidate] = {}  # by file descriptor, oldest first
        self._selector = selectors.DefaultSelector()
        self._at_once = max(_AT_ONCE, 2 * len(ranks))
        self._refusals = RefusalLog()

    def __enter__(self) -> Self:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for candidate in list(self._candidates.values()):
            self._remove_candidate(candidate)
            candidate.connection.close()
        self._selector.close()

    def arrivals(self, *, deadline: float) -> Iterator[tuple[RemoteAgent, Message]]:
        """Yield each agent admitted before ``deadline`` (monotonic seconds), with its host's facts."""
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left, self._drop_late())):
                if key.fileobj is self._listener:
                    self._accept_connection()
                elif (candidate := self._candidates.get(key.fd)) and (arrived := self._advance_candidate(candidate)):
                    yield arrived

    def _accept_connection(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:  # the peer has already disconnected
            return
        except OSError as error:
            self._refusals.record_refusal("a connection", error)
            time.sleep(_PAUSE)
            return
        if len(self._candidates) >= self._at_once:
            self._refuse_candidate(next(iter(self._candidates.values())), "too many pending connections")
        candidate = _Candidate(connection, address[0], self._key, self._ranks)
        self._candidates[connection.fileno()] = candidate
        self._selector.register(connection, selectors.EVENT_READ)

    def _advance_candidate(self, candidate: _Candidate) -> tuple[RemoteAgent, Message] | None:
        try:
            admitted = candidate.advance_handshake()
            if admitted is None:
                return None
            connection = AgentConnection(candidate.connection, admitted.seal, self._silence)
            connection.send(admitted=True)
        except OSError as error:
            self._refuse_candidate(candidate, error)
            return None
        self._remove_candidate(candidate)
        return RemoteAgent(admitted.rank, admitted.facts["host"], connection), admitted.facts

    def _drop_late(self) -> float:
        """Refuse candidates past their deadline; return the seconds until the next deadline."""
        now = time.monotonic()
        for candidate in list(self._candidates.values()):
            if candidate.deadline > now:
                return candidate.deadline - now
            self._refuse_candidate(candidate, f"not authenticated within {_SECONDS:g} s")
        return _SECONDS

    def _refuse_candidate(self, candidate: _Candidate, why: object) -> None:
        self._refusals.record_refusal(candidate.address, why)
        self._remove_candidate(candidate)
        candidate.connection.close()

    def _remove_candidate(self, candidate: _Candidate) -> None:
        self._selector.unregister(candidate.connection)
        del self._candidates[candidate.connection.fileno()]


@final
class AgentConnection:
    """Exchanges messages with an agent; fails after ``patience`` seconds of silence.

    Args:
        connection: A connected socket after the handshake.
        seal: The seal that the handshake returned.
        patience: Maximum seconds for one complete message.
    """

    def __init__(self, connection: socket.socket, seal: MessageSeal, patience: float) -> None:
        connection.settimeout(patience)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._seal, self._patience = connection, seal, patience
        self._sending = threading.Lock()

    @property
    def name(self) -> str:
        """Unique name of this connection, the same at both ends."""
        return self._seal.name

    def send(self, **message: Any) -> None:
        """Send a message; without arguments, a heartbeat. Raises OSError if disconnected."""
        with self._sending:
            self._connection.sendall(self._seal.seal_message(message))

    def receive(self) -> Message:
        """Return the next message, skipping heartbeats. Raises OSError if the peer is lost."""
        while True:
            deadline = time.monotonic() + self._patience
            head = receive_exactly(self._connection, LENGTH.size, deadline=deadline)
            body = receive_exactly(self._connection, self._seal.bytes_after(head), deadline=deadline)
            if message := self._seal.open_message(body):
                return message

    def close(self) -> None:
        """Shut down the connection, even if processes forked meanwhile hold its descriptor open."""
        with suppress(OSError):  # already disconnected
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@final
class HeartbeatSender:
    """Context manager for a thread that sends heartbeats over ``connections``.

    The interval is a quarter of ``patience``, in seconds.
    """

    def __init__(self, connections: Sequence[AgentConnection], patience: float) -> None:
        self._connections, self._interval = connections, patience / 4
        self._ended = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._send_heartbeats, daemon=True, name="heartbeat").start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _send_heartbeats(self) -> None:
        while not self._ended.wait(self._interval):
            for connection in self._connections:
                with suppress(OSError):  # detected by the thread that receives from this connection
                    connection.send()


@final
@dataclass
class RemoteAgent:
    """The agent of a remote host, as seen by the first host."""

    rank: int
    host: str
    connection: AgentConnection
    outcome: Outcome | None = None
    is_there: bool = True

    @staticmethod
    def create_absent(rank: int, host: str) -> RemoteAgent:
        """Return a placeholder for an absent host's agent; its connection is closed."""
        connection = AgentConnection(socket.socket(), MessageSeal(sending=b"", receiving=b""), 1.0)
        connection.close()
        return RemoteAgent(rank, host, connection, is_there=False)

    def announce_end(self, code: int) -> None:
        """Send the run's exit code to the agent, ignoring a lost connection."""
        with suppress(OSError):
            self.connection.send(over=code)


def receive_exactly(connection: socket.socket, count: int, *, deadline: float) -> bytes:
    """Receive ``count`` bytes before ``deadline`` (monotonic seconds).

    Raises:
        OSError: not all bytes arrived in time (TimeoutError), the peer disconnected, or another thread closed the
            connection.
    """
    data = bytearray()
    while len(data) < count:
        data += _receive_some(connection, count - len(data), deadline)
    return bytes(data)


def receive_line(connection: socket.socket, *, at_most: int, deadline: float) -> bytes:
    """Receive a line before ``deadline`` (monotonic seconds).

    Bytes after the line may be received, and are dropped.

    Raises:
        OSError: the line did not arrive in time or is longer than ``at_most`` bytes, or the peer disconnected.
    """
    data = bytearray()
    while b"\n" not in data:
        if len(data) >= at_most:
            raise ConnectionError(f"received a line of more than {at_most} bytes")
        data += _receive_some(connection, at_most - len(data), deadline)
    return bytes(data[: data.index(b"\n") + 1])


def _receive_some(connection: socket.socket, at_most: int, deadline: float) -> bytes:
    arrival = select.poll()
    try:
        arrival.register(connection, select.POLLIN)
    except ValueError:  # the socket is closed
        raise ConnectionAbortedError("this process closed the connection") from None
    left = deadline - time.monotonic()
    if left <= 0 or not arrival.poll(math.ceil(left * 1000)):
        raise TimeoutError("timed out")
    if not (data := connection.recv(at_most)):
        raise ConnectionResetError("the peer closed the connection")
    return data


_LOGGED = 100


@final
class RefusalLog:
    """Counts a server's refusals; logs the first 100, then every hundredth.

    Attributes:
        count: Number of refusals so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._changing = threading.Lock()

    def record_refusal(self, who: str, why: object) -> None:
        """Count a refusal of the peer ``who``, and log it if due. Thread-safe."""
        with self._changing:
            self.count += 1
            count = self.count
        if count <= _LOGGED or count % _LOGGED == 0:  # a flood of refusals must not fill the disk
            _logger.info("refused %s: %s (%d so far)", who, why, count)


@final
class Mailbox(Generic[T]):
    """Queue from many threads to one; ``arrival`` is readable while the queue has items."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self.arrival, self._write = Pipe(duplex=False)

    def put(self, item: T) -> None:
        self._items.put(item)
        self._write.send_bytes(b"!")

    def get(self) -> T:
        """Wait for the next item and return it."""
        self.arrival.recv_bytes()
        return self._items.get()
