"""Admits the other hosts' agents at the first host's port, which anybody on the network can reach."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Self, final

from worldsize.net.agent_connection import AgentConnection, RemoteAgent
from worldsize.net.handshake import Admitted, Message, Turn, admit
from worldsize.net.refusals import RefusalLog
from worldsize.net.run_key import RunKey

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
