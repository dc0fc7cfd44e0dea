"""A channel: frames over a connected socket, Unix-domain inside a host or TCP with mutual TLS 1.3 between hosts.

Data is not copied between a socket and a tensor: buffers are passed to the kernel as lists (scatter-gather I/O).
Inside a host large payloads go through shared memory, see :mod:`worldsize.net.frames`.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, final

from worldsize.collectives.peer_waits import PEER_WAIT
from worldsize.collectives.step_timer import phase
from worldsize.net.frames import (
    AVAILABLE,
    HEADER_BYTES,
    MIN_BYTES,
    SPIN_SECONDS,
    CommonOperation,
    Header,
    Pair,
    RefusedError,
    accept_shared_memory,
    message,
    offer_shared_memory,
    operations_by_number,
    parse,
    read_message,
)

_BUFFERS = 512  # buffers in one system call; the kernel takes at most 1024
_JOINED = 1 << 14  # bytes; smaller buffers are joined for TLS, since each record costs a call


class LostError(ConnectionError):
    """The peer closed the connection, or has been silent for longer than the channel waits."""


@final
class Channel:
    """One connection to a peer. Only one thread may send, and only one receive, at a time.

    Args:
        connection: A connected socket. :func:`worldsize.net.endpoints.connect` and
            :func:`~worldsize.net.endpoints.accept_channel` authenticate the peer before they make a channel.
        operations: The protocol; a frame with another operation is refused.
        identity: The name in the peer's certificate, None where there is none.
    """

    def __init__(self, connection: socket.socket, *, operations: type[IntEnum], identity: str | None = None) -> None:
        self._stream = _Stream(connection)
        self._known = operations_by_number(operations)
        self._header = bytearray(HEADER_BYTES)
        self._later: list[bytes] = []
        self._is_quick = False  # whether the previous frame arrived within the time for which spinning pays
        self._memory: Pair | None = None
        self._patience = math.inf
        self.identity = identity

    def wait_at_most(self, seconds: float) -> None:
        """Make every later send and receive raise LostError after so many seconds without progress.

        Headers and JSON messages must be complete within about that time, so that a peer cannot stall the channel by
        sending a byte now and then.
        """
        self._patience = seconds
        self._stream.wait_at_most(seconds)
        for direction in self._memory or ():
            _bound(direction.signals, seconds)

    def share(self, seconds: float) -> None:
        """Send payloads of 256 KiB and more through shared memory from now on, if the peer is on this host.

        The peer must call :meth:`accept_share` when the frame SHARE arrives. ``seconds`` is as in
        :meth:`wait_at_most`. Raises LostError.
        """
        if AVAILABLE and self._stream.is_local:
            self.send(Header(CommonOperation.SHARE))
            try:
                self._memory = offer_shared_memory(self._stream.connection)
            except OSError as error:
                raise LostError(str(error)) from error
            self.wait_at_most(seconds)

    def accept_share(self, seconds: float) -> None:
        """Take part in the peer's :meth:`share`.

        Raises:
            LostError: The peer has gone.
            RefusedError: The memory has the wrong size, or the peer could make it shrink.
        """
        try:
            self._memory = accept_shared_memory(self._stream.connection)
        except OSError as error:
            raise LostError(str(error)) from error
        self.wait_at_most(seconds)

    def send(self, header: Header, payload: Sequence[memoryview] = ()) -> None:
        """Send one frame, whose payload is the concatenation of ``payload``. Raises LostError."""
        heads = memoryview(b"".join((*self._later, header.pack())))
        self._later.clear()
        parts = [part for part in payload if part.nbytes]
        try:
            with phase("communication"):
                if self._memory and header.length >= MIN_BYTES:
                    self._stream.send([heads])
                    self._memory[0].send(parts)
                else:
                    self._stream.send([heads, *parts])
        except OSError as error:
            raise _lost(error, self._patience) from error

    def send_later(self, header: Header) -> None:
        """Send a frame without payload together with the next frame, or before the next wait for the peer.

        The peer then wakes up only once for both.
        """
        self._later.append(header.pack())

    def send_message(self, operation: IntEnum, facts: Any) -> None:
        """Send ``facts`` as JSON. Raises LostError."""
        self.send(*message(operation, facts))

    def header(self) -> Header:
        """Receive the next frame's header; its payload must be received next.

        Raises:
            LostError: The peer has gone.
            RefusedError: The bytes are not a header of this protocol, see :func:`worldsize.net.frames.parse`.
        """
        begun = time.perf_counter()
        if self._later and not self._stream.has_arrived():
            self._flush()
        if self._is_quick:
            self._stream.spin(begun + SPIN_SECONDS)
        self.fill([memoryview(self._header)], deadline=begun + self._patience)
        self._is_quick = time.perf_counter() - begun < SPIN_SECONDS
        return parse(self._header, self._known)

    def _flush(self) -> None:
        heads = memoryview(b"".join(self._later))
        self._later.clear()
        try:
            self._stream.send([heads])
        except OSError as error:
            raise LostError(str(error)) from error

    def fill(self, parts: Sequence[memoryview], *, deadline: float = math.inf) -> None:
        """Receive one payload into ``parts``, which hold it exactly. Raises LostError.

        It must be complete by about ``deadline``, in seconds of ``time.perf_counter()``.

        Compare the header with what is expected first (:meth:`Header.require`), so that a peer cannot choose how much
        is received.
        """
        rest = [part for part in parts if part.nbytes]
        try:
            with phase("communication"):
                if self._memory and sum(part.nbytes for part in rest) >= MIN_BYTES:
                    self._memory[1].fill(rest)
                else:
                    self._stream.fill(rest, deadline)
        except OSError as error:
            raise error if isinstance(error, LostError) else _lost(error, self._patience) from error

    def message(self, header: Header) -> Any:
        """Receive the JSON that follows ``header``, at most 16 MiB.

        Raises:
            LostError: The peer has gone.
            RefusedError: The payload is larger, not JSON, or nested too deeply.
        """
        header.require_message()
        data = bytearray(header.length)
        self.fill([memoryview(data)], deadline=time.perf_counter() + self._patience)
        try:
            return read_message(bytes(data))
        except ValueError:
            raise RefusedError(f"{header.operation.name} carries {len(data)} bytes that are no JSON") from None

    def answer(self, *expected: IntEnum) -> Header:
        """Receive the next frame's header, which must have one of the operations ``expected``.

        Raises:
            LostError: The peer has gone.
            RefusedError: The frame has another operation, or is REFUSED; the error then has the peer's reason.
        """
        with PEER_WAIT.during(f"the message {expected[0].name} of a peer"):
            header = self.header()
        if header.operation == CommonOperation.REFUSED:
            raise RefusedError(str(self.message(header)))
        if header.operation not in expected:
            raise RefusedError(f"received {header.operation.name}, expected {expected[0].name}")
        return header

    def close(self) -> None:
        """Close the connection; a receive in another thread then raises LostError."""
        for connection in (self._stream.connection, *(direction.signals for direction in self._memory or ())):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@final
class _Stream:
    """The bytes of a connected socket, with TLS or without. All methods raise OSError."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_local = connection.family == socket.AF_UNIX
        self._is_tls = isinstance(connection, ssl.SSLSocket)
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)

    def wait_at_most(self, seconds: float) -> None:
        if self._is_tls:
            self.connection.settimeout(seconds)
        else:
            _bound(self.connection, seconds)

    def has_arrived(self) -> bool:
        """Return whether there are bytes to read."""
        if self._arrivals.poll(0):
            return True
        return isinstance(self.connection, ssl.SSLSocket) and self.connection.pending() > 0

    def spin(self, until: float) -> None:
        """Poll for data until the time ``until``: waking up takes longer than a running peer takes to answer."""
        with phase("communication"):
            while time.perf_counter() < until and not self.has_arrived():
                pass

    def send(self, parts: list[memoryview]) -> None:
        if self._is_tls:
            for part in _joined(parts):
                self.connection.sendall(part)
            return
        first = 0
        while first < len(parts):
            sent = self.connection.sendmsg(parts[first : first + _BUFFERS])
            while first < len(parts) and sent >= parts[first].nbytes:
                sent -= parts[first].nbytes
                first += 1
            if sent:
                parts[first] = parts[first][sent:]

    def fill(self, rest: list[memoryview], deadline: float) -> None:
        while rest:
            received = self._receive(rest[:_BUFFERS])
            if received == 0:
                raise LostError("the peer closed the connection")
            if time.perf_counter() > deadline:
                raise LostError("the peer takes too long to complete a frame")
            while rest and received >= rest[0].nbytes:
                received -= rest.pop(0).nbytes
            if received:
                rest[0] = rest[0][received:]

    def _receive(self, parts: list[memoryview]) -> int:
        if self._is_tls:
            return self.connection.recv_into(parts[0])
        return self.connection.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]


def _bound(connection: socket.socket, seconds: float) -> None:
    # not settimeout, which makes the socket non-blocking: a receive would return after every few KiB
    bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, bound)


def _lost(error: OSError, patience: float) -> LostError:
    """Return the error of a channel whose peer has gone, or has made no progress within the seconds of ``patience``."""
    is_silent = isinstance(error, BlockingIOError | TimeoutError)  # of a plain socket, and of TLS
    return LostError(f"the peer made no progress for {patience:g} s" if is_silent else str(error))


def _joined(parts: Sequence[memoryview]) -> list[memoryview]:
    """Return the same bytes, with adjacent buffers below 16 KiB joined."""
    result: list[memoryview] = []
    small = bytearray()
    for part in parts:
        if part.nbytes >= _JOINED:
            result += [memoryview(small), part] if small else [part]
            small = bytearray()
        else:
            small += part
    return [*result, memoryview(small)] if small else result
