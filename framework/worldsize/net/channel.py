"""Channels: frames over a Unix socket inside a host, or over mutual TLS 1.3 between hosts.

Scatter-gather I/O avoids extra copies between sockets and tensors. Inside a host, large payloads are transferred
through shared memory, see :mod:`worldsize.net.frames`.
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

from worldsize.collectives.group import PEER_WAIT
from worldsize.collectives.step_timer import measure_phase
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
    encode_message,
    offer_shared_memory,
    operations_by_number,
    parse_header,
    read_message,
)

_BUFFERS = 512  # buffers per system call; the kernel accepts at most 1024
_JOINED = 1 << 14  # bytes; smaller buffers are joined for TLS, since each send is a separate record


class LostError(ConnectionError):
    """The peer closed the connection, or was silent for longer than the channel's timeout."""


@final
class Channel:
    """A connection to a peer; one thread may send and one may receive at a time.

    Args:
        connection: A connected socket. :func:`worldsize.net.endpoints.connect_channel` and
            :func:`~worldsize.net.endpoints.accept_channel` authenticate the peer before they create a channel.
        operations: The protocol; frames with an unknown operation are refused.
        identity: The name in the peer's certificate; None without a certificate.
    """

    def __init__(self, connection: socket.socket, *, operations: type[IntEnum], identity: str | None = None) -> None:
        self._stream = _Stream(connection)
        self._known = operations_by_number(operations)
        self._header = bytearray(HEADER_BYTES)
        self._later: list[bytes] = []
        self._is_quick = False  # whether the previous header arrived within SPIN_SECONDS
        self._memory: Pair | None = None
        self._patience = math.inf
        self.identity = identity

    def wait_at_most(self, seconds: float) -> None:
        """Make sends and receives raise LostError after ``seconds`` without progress.

        Headers and JSON messages must be complete within about this time, so that a peer cannot stall the channel by
        sending a byte now and then.
        """
        self._patience = seconds
        self._stream.wait_at_most(seconds)
        for direction in self._memory or ():
            _set_timeouts(direction.signals, seconds)

    def offer_share(self, seconds: float) -> None:
        """Send payloads of 256 KiB or more through shared memory, if the peer is on this host.

        The peer must call :meth:`accept_share` when it receives the SHARE frame. ``seconds`` is the timeout, see
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
        """Accept the shared memory that the peer offered with :meth:`offer_share`.

        ``seconds`` is the timeout, see :meth:`wait_at_most`.

        Raises:
            LostError: The connection is lost.
            RefusedError: The memory has the wrong size, or the peer could shrink it.
        """
        try:
            self._memory = accept_shared_memory(self._stream.connection)
        except OSError as error:
            raise LostError(str(error)) from error
        self.wait_at_most(seconds)

    def send(self, header: Header, payload: Sequence[memoryview] = ()) -> None:
        """Send a frame; its payload is the concatenated buffers ``payload``. Raises LostError."""
        heads = memoryview(b"".join((*self._later, header.pack())))
        self._later.clear()
        parts = [part for part in payload if part.nbytes]
        try:
            with measure_phase("communication"):
                if self._memory and header.length >= MIN_BYTES:
                    self._stream.send([heads])
                    self._memory[0].send(parts)
                else:
                    self._stream.send([heads, *parts])
        except OSError as error:
            raise _create_lost_error(error, self._patience) from error

    def send_later(self, header: Header) -> None:
        """Queue a frame without payload until the next frame or the next wait for the peer.

        The peer then wakes up only once for both frames.
        """
        self._later.append(header.pack())

    def send_message(self, operation: IntEnum, facts: Any) -> None:
        """Send ``facts`` as JSON. Raises LostError."""
        self.send(*encode_message(operation, facts))

    def receive_header(self) -> Header:
        """Receive the next frame's header; the caller must receive the payload next.

        Raises:
            LostError: The connection is lost.
            RefusedError: The header is invalid in this protocol, see :func:`worldsize.net.frames.parse_header`.
        """
        begun = time.perf_counter()
        if self._later and not self._stream.has_arrived():
            self._send_queued()
        if self._is_quick:
            self._stream.poll_until(begun + SPIN_SECONDS)
        self.receive_into([memoryview(self._header)], deadline=begun + self._patience)
        self._is_quick = time.perf_counter() - begun < SPIN_SECONDS
        return parse_header(self._header, self._known)

    def _send_queued(self) -> None:
        heads = memoryview(b"".join(self._later))
        self._later.clear()
        try:
            self._stream.send([heads])
        except OSError as error:
            raise LostError(str(error)) from error

    def receive_into(self, parts: Sequence[memoryview], *, deadline: float = math.inf) -> None:
        """Receive a payload into the buffers ``parts`` of the same total size. Raises LostError.

        Check the header first (:meth:`Header.require_payload`), so that a peer cannot choose the size of the payload.
        The payload must be complete by about ``deadline``, in seconds of ``time.perf_counter()``.
        """
        rest = [part for part in parts if part.nbytes]
        try:
            with measure_phase("communication"):
                if self._memory and sum(part.nbytes for part in rest) >= MIN_BYTES:
                    self._memory[1].receive_payload(rest)
                else:
                    self._stream.read_into(rest, deadline)
        except OSError as error:
            raise error if isinstance(error, LostError) else _create_lost_error(error, self._patience) from error

    def receive_message(self, header: Header) -> Any:
        """Receive the JSON message that follows ``header``, at most 16 MiB.

        Raises:
            LostError: The connection is lost.
            RefusedError: The payload is too large, not JSON, or nested too deeply.
        """
        header.require_message()
        data = bytearray(header.length)
        self.receive_into([memoryview(data)], deadline=time.perf_counter() + self._patience)
        try:
            return read_message(bytes(data))
        except ValueError:
            raise RefusedError(f"{header.operation.name}: the payload of {len(data)} bytes is not valid JSON") from None

    def receive_answer(self, *expected: IntEnum) -> Header:
        """Receive the next frame's header, and check that its operation is one of ``expected``.

        Raises:
            LostError: The connection is lost.
            RefusedError: The operation is unexpected, or is REFUSED; the error then contains the peer's reason.
        """
        with PEER_WAIT.name_wait(f"the message {expected[0].name} from a peer"):
            header = self.receive_header()
        if header.operation == CommonOperation.REFUSED:
            raise RefusedError(str(self.receive_message(header)))
        if header.operation not in expected:
            raise RefusedError(f"expected {expected[0].name}, got {header.operation.name}")
        return header

    def close(self) -> None:
        """Close the connection; a receive in progress in another thread then raises LostError."""
        for connection in (self._stream.connection, *(direction.signals for direction in self._memory or ())):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@final
class _Stream:
    """Byte stream over a connected socket, with or without TLS. All methods raise OSError."""

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
            _set_timeouts(self.connection, seconds)

    def has_arrived(self) -> bool:
        """Return whether there are bytes to read."""
        if self._arrivals.poll(0):
            return True
        return isinstance(self.connection, ssl.SSLSocket) and self.connection.pending() > 0

    def poll_until(self, until: float) -> None:
        """Busy-wait for data until ``until``; sleeping takes longer than a typical answer."""
        with measure_phase("communication"):
            while time.perf_counter() < until and not self.has_arrived():
                pass

    def send(self, parts: list[memoryview]) -> None:
        if self._is_tls:
            for part in _join_small_buffers(parts):
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

    def read_into(self, rest: list[memoryview], deadline: float) -> None:
        while rest:
            received = self._receive_chunk(rest[:_BUFFERS])
            if received == 0:
                raise LostError("the peer closed the connection")
            if time.perf_counter() > deadline:
                raise LostError("the peer took too long to send a complete frame")
            while rest and received >= rest[0].nbytes:
                received -= rest.pop(0).nbytes
            if received:
                rest[0] = rest[0][received:]

    def _receive_chunk(self, parts: list[memoryview]) -> int:
        if self._is_tls:
            return self.connection.recv_into(parts[0])
        return self.connection.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]


def _set_timeouts(connection: socket.socket, seconds: float) -> None:
    # settimeout would make the socket non-blocking, and a receive would return after every few KiB
    bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, bound)


def _create_lost_error(error: OSError, patience: float) -> LostError:
    """Convert ``error`` to a LostError; a timeout mentions the ``patience`` in seconds."""
    is_silent = isinstance(error, BlockingIOError | TimeoutError)  # timeouts without and with TLS
    return LostError(f"the peer made no progress for {patience:g} s" if is_silent else str(error))


def _join_small_buffers(parts: Sequence[memoryview]) -> list[memoryview]:
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
