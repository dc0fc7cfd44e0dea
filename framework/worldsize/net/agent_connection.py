"""Admits and connects the agents of a run's hosts, at a port that anybody on the network can reach.

Connections of authenticated agents carry heartbeats. Reads from untrusted peers are limited in bytes and time, and the
log of refusals stays short however many there are. :class:`Mailbox` is a queue between threads that a loop can wait
for together with files. Imports no torch.
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
from worldsize.net.handshake import LENGTH, Admitted, Message, MessageSeal, Turn, admit

_logger = logging.getLogger(__name__)
T = TypeVar("T")

_SECONDS = 10.0  # seconds for a handshake and the facts of a host together
_AT_ONCE = 256  # most pending connections, if two per node are not more; a new one replaces the oldest
_PAUSE = 0.1  # seconds to wait if a connection cannot be accepted, such as without free file descriptors


@final
class _Candidate:
    """A connection that is not authenticated yet; it never blocks."""

    def __init__(self, connection: socket.socket, address: str, key: RunKey, ranks: range) -> None:
        connection.setblocking(False)
        self.connection, self.address = connection, address
        self.deadline = time.monotonic() + _SECONDS
        self._handshake = admit(key, ranks)
        self._turn: Turn = next(self._handshake)
        self._received = bytearray()

    def advance(self) -> Admitted | None:
        """Process received bytes; return the agent once it is authenticated. Raise OSError if that fails."""
        with suppress(BlockingIOError):
            data = self.connection.recv(self._turn.receive - len(self._received))
            if not data:
                raise ConnectionResetError("it disconnected before it was authenticated")
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
    """Admits agents concurrently, so that a silent, slow or foreign connection does not delay the others.

    On leaving its context, pending connections are closed.

    Args:
        listener: The first host's port.
        key: The key that an agent must prove to have.
        ranks: The ranks of the expected nodes.
        silence: Seconds without a heartbeat after which an admitted agent is considered lost.
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
            self._forget(candidate)
            candidate.connection.close()
        self._selector.close()

    def arrivals(self, *, deadline: float) -> Iterator[tuple[RemoteAgent, Message]]:
        """Yield every agent that is admitted until ``deadline``, in monotonic seconds, with the facts of its host."""
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(min(left, self._drop_late())):
                if key.fileobj is self._listener:
                    self._accept()
                elif (candidate := self._candidates.get(key.fd)) and (arrived := self._advance(candidate)):
                    yield arrived

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except BlockingIOError:  # it has already disconnected
            return
        except OSError as error:
            self._refusals.add("a connection", error)
            time.sleep(_PAUSE)
            return
        if len(self._candidates) >= self._at_once:
            self._refuse(next(iter(self._candidates.values())), "others want to be heard")
        candidate = _Candidate(connection, address[0], self._key, self._ranks)
        self._candidates[connection.fileno()] = candidate
        self._selector.register(connection, selectors.EVENT_READ)

    def _advance(self, candidate: _Candidate) -> tuple[RemoteAgent, Message] | None:
        try:
            admitted = candidate.advance()
            if admitted is None:
                return None
            connection = AgentConnection(candidate.connection, admitted.seal, self._silence)
            connection.send(admitted=True)
        except OSError as error:
            self._refuse(candidate, error)
            return None
        self._forget(candidate)
        return RemoteAgent(admitted.rank, admitted.facts["host"], connection), admitted.facts

    def _drop_late(self) -> float:
        """Refuse candidates that are past their deadline; return the seconds until the next deadline."""
        now = time.monotonic()
        for candidate in list(self._candidates.values()):
            if candidate.deadline > now:
                return candidate.deadline - now
            self._refuse(candidate, f"it has not proven who it is within {_SECONDS:g} s")
        return _SECONDS

    def _refuse(self, candidate: _Candidate, why: object) -> None:
        self._refusals.add(candidate.address, why)
        self._forget(candidate)
        candidate.connection.close()

    def _forget(self, candidate: _Candidate) -> None:
        self._selector.unregister(candidate.connection)
        del self._candidates[candidate.connection.fileno()]


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


def receive_exactly(connection: socket.socket, count: int, *, deadline: float) -> bytes:
    """Receive ``count`` bytes by ``deadline``, in seconds of ``time.monotonic()``.

    Raises:
        OSError: not all bytes arrived in time (TimeoutError), or the peer has disconnected, or another thread has
            closed the connection.
    """
    data = bytearray()
    while len(data) < count:
        data += _receive_some(connection, count - len(data), deadline)
    return bytes(data)


def receive_line(connection: socket.socket, *, at_most: int, deadline: float) -> bytes:
    """Receive up to the first newline, by ``deadline`` in monotonic seconds. Bytes after it may be lost.

    Raises:
        OSError: no line of ``at_most`` bytes arrived in time, or the peer has disconnected.
    """
    data = bytearray()
    while b"\n" not in data:
        if len(data) >= at_most:
            raise ConnectionError(f"a line of more than {at_most} bytes came")
        data += _receive_some(connection, at_most - len(data), deadline)
    return bytes(data[: data.index(b"\n") + 1])


def _receive_some(connection: socket.socket, at_most: int, deadline: float) -> bytes:
    arrival = select.poll()
    try:
        arrival.register(connection, select.POLLIN)
    except ValueError:  # a closed socket has no descriptor
        raise ConnectionAbortedError("this end closed the connection") from None
    left = deadline - time.monotonic()
    if left <= 0 or not arrival.poll(math.ceil(left * 1000)):
        raise TimeoutError("timed out")
    if not (data := connection.recv(at_most)):
        raise ConnectionResetError("the other end closed the connection")
    return data


_LOGGED = 100


@final
class RefusalLog:
    """Counts what a server refuses, and logs the first 100 refusals and every hundredth of the others.

    Attributes:
        count: The number of refusals so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._changing = threading.Lock()

    def add(self, who: str, why: object) -> None:
        """Count one more refusal, of ``who``; thread-safe."""
        with self._changing:
            self.count += 1
            count = self.count
        if count <= _LOGGED or count % _LOGGED == 0:  # a flood of them must not fill the disk
            _logger.info("refused %s: %s (%d so far)", who, why, count)


@final
class Mailbox(Generic[T]):
    """Any thread puts items; one takes them. ``arrival`` is readable while there are some."""

    def __init__(self) -> None:
        self._items: SimpleQueue[T] = SimpleQueue()
        self.arrival, self._write = Pipe(duplex=False)

    def put(self, item: T) -> None:
        self._items.put(item)
        self._write.send_bytes(b"!")

    def get(self) -> T:
        """Wait for the next item."""
        self.arrival.recv_bytes()
        return self._items.get()
