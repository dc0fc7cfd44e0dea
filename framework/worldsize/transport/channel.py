"""Frames over a socket: Unix-domain inside a host, TCP with mutual TLS 1.3 between hosts.

Addresses are texts, ``unix:/folder/name`` or ``tcp:host:port``. Nothing is copied on the way between a socket
and a tensor: buffers are handed to the kernel as lists (scatter-gather). Inside a host large ones go through memory
that both ends map, see :mod:`lane`.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from os import getuid
from pathlib import Path
from typing import Any, final

from worldsize.collectives.step_timer import phase
from worldsize.errors import ConfigError
from worldsize.transport.certificates import Keys
from worldsize.transport.frames import (
    SIZE,
    Header,
    Operation,
    RefusedError,
    message,
    parse,
)
from worldsize.transport.shared_memory import AVAILABLE, LEAST, POLLED, Lane, accept, offer

_BUFFERS = 512  # in one system call; the kernel takes at most 1024
_ROOM = 1 << 20  # bytes a Unix socket buffers, so that its ends wait less for each other; TCP finds its own size
_JOINED = 1 << 14  # over TLS, smaller buffers are joined: each record costs a call


class LostError(ConnectionError):
    """The peer has gone, or has been silent for longer than the channel waits."""


@final
class Channel:
    """One connection. ``identity``: the name in the peer's certificate, None where there is none."""

    def __init__(self, connection: socket.socket, *, identity: str | None = None) -> None:
        self._socket = connection
        self._tls = isinstance(connection, ssl.SSLSocket)
        self._header = bytearray(SIZE)
        self._arrivals = select.poll()
        self._arrivals.register(connection, select.POLLIN)
        self._later: list[bytes] = []
        self._is_quick = False  # the frame before came within the time that is worth polling for
        self._there: Lane | None = None
        self._back: Lane | None = None
        self.identity = identity

    def wait_at_most(self, seconds: float) -> None:
        """Bound every later send and receive, in the time without progress."""
        if self._tls:
            self._socket.settimeout(seconds)
            return
        for connection in self._sockets():
            _bound(connection, seconds)

    def _sockets(self) -> list[socket.socket]:
        return [self._socket, *(lane.line for lane in (self._there, self._back) if lane)]

    def share(self, seconds: float) -> None:
        """Where the peer is on this host, send large payloads through memory from now on. Raises LostError."""
        if AVAILABLE and self._socket.family == socket.AF_UNIX:
            self.send(Header(Operation.SHARE))
            self._share(offer, seconds)

    def accept_share(self, seconds: float) -> None:
        """After the peer's :meth:`share`. Raises LostError or RefusedError."""
        self._share(accept, seconds)

    def _share(self, agree: Callable[[socket.socket], tuple[Lane, Lane]], seconds: float) -> None:
        try:
            self._there, self._back = agree(self._socket)
        except OSError as error:
            raise LostError(str(error)) from error
        self.wait_at_most(seconds)

    def send(self, header: Header, payload: Sequence[memoryview] = ()) -> None:
        """Raises LostError."""
        heads = memoryview(b"".join((*self._later, header.pack())))
        self._later.clear()
        parts = [part for part in payload if part.nbytes]
        try:
            with phase("communication"):
                if self._there and header.length >= LEAST:
                    self._send([heads])
                    self._there.send(parts)
                else:
                    self._send([heads, *parts])
        except OSError as error:
            raise LostError(str(error)) from error

    def send_later(self, header: Header) -> None:
        """Together with the next frame, or when this end has nothing left to read: a peer is woken once for both."""
        self._later.append(header.pack())

    def _send(self, parts: list[memoryview]) -> None:
        if self._tls:
            for part in _joined(parts):
                self._socket.sendall(part)
            return
        first = 0
        while first < len(parts):
            sent = self._socket.sendmsg(parts[first : first + _BUFFERS])
            while first < len(parts) and sent >= parts[first].nbytes:
                sent -= parts[first].nbytes
                first += 1
            if sent:
                parts[first] = parts[first][sent:]

    def header(self) -> Header:
        """The next frame's header. Raises LostError or RefusedError."""
        begun = time.perf_counter()
        if self._later and not self._has_arrived():
            self._flush()
        if self._is_quick:
            self._poll(begun + POLLED)
        self.fill([memoryview(self._header)])
        self._is_quick = time.perf_counter() - begun < POLLED
        return parse(self._header)

    def _flush(self) -> None:
        heads = memoryview(b"".join(self._later))
        self._later.clear()
        try:
            self._send([heads])
        except OSError as error:
            raise LostError(str(error)) from error

    def _poll(self, until: float) -> None:
        """Stay awake until something comes: to be woken takes longer than a peer that is awake does to answer."""
        with phase("communication"):
            while time.perf_counter() < until and not self._has_arrived():
                pass

    def _has_arrived(self) -> bool:
        """Whether there is something to read."""
        return bool(self._arrivals.poll(0)) or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0)

    def fill(self, parts: Sequence[memoryview]) -> None:
        """Receive one payload, which ``parts`` hold exactly. Raises LostError."""
        with phase("communication"):
            self._fill([part for part in parts if part.nbytes])

    def _fill(self, rest: list[memoryview]) -> None:
        try:
            if self._back and sum(part.nbytes for part in rest) >= LEAST:
                return self._back.fill(rest)
            while rest:
                received = self._receive(rest[:_BUFFERS])
                if received == 0:
                    raise LostError("the peer closed the connection")
                while rest and received >= rest[0].nbytes:
                    received -= rest.pop(0).nbytes
                if received:
                    rest[0] = rest[0][received:]
        except OSError as error:
            raise error if isinstance(error, LostError) else LostError(str(error)) from error

    def _receive(self, parts: list[memoryview]) -> int:
        if self._tls:
            return self._socket.recv_into(parts[0])
        return self._socket.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0]

    def tell(self, operation: Operation, facts: Any) -> None:
        """Send JSON. Raises LostError."""
        self.send(*message(operation, facts))

    def message(self, header: Header) -> Any:
        """The JSON that follows ``header``. Raises LostError or RefusedError."""
        header.require_message()
        data = bytearray(header.length)
        self.fill([memoryview(data)])
        try:
            return json.loads(data)
        except ValueError:
            raise RefusedError(f"{header.operation.name} carries {len(data)} bytes that are no JSON") from None

    def answer(self, *expected: Operation) -> Header:
        """The next frame's header, one of ``expected``. Raises LostError, or RefusedError with the peer's reason."""
        header = self.header()
        if header.operation == Operation.REFUSED:
            raise RefusedError(str(self.message(header)))
        if header.operation not in expected:
            raise RefusedError(f"{header.operation.name} came, {expected[0].name} was expected")
        return header

    def close(self) -> None:
        """Ends a receive of another thread, too."""
        for connection in self._sockets():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


def _bound(connection: socket.socket, seconds: float) -> None:
    # not settimeout, which makes the socket non-blocking: a receive would return with every few KiB
    bound = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, bound)


def _joined(parts: Sequence[memoryview]) -> list[memoryview]:
    """The same bytes, neighbours below 16 KiB joined."""
    result: list[memoryview] = []
    small = bytearray()
    for part in parts:
        if part.nbytes >= _JOINED:
            result += [memoryview(small), part] if small else [part]
            small = bytearray()
        else:
            small += part
    return [*result, memoryview(small)] if small else result


def listen(address: str, keys: Keys | None) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        ConfigError: the address can be reached from other hosts, and there are no keys.
    """
    kind, _, where = address.partition(":")
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        Path(where).unlink(missing_ok=True)  # of a server that was killed; the folder is ours alone
        listener.bind(where)
    else:
        host, _, port = where.rpartition(":")
        if keys is None and not ip_address(socket.gethostbyname(host)).is_loopback:
            raise ConfigError(
                f"a parameter server at {host} could be reached by anyone on the network. "
                "Set strategy.transport=tls, or stay on one host."
            )
        listener = socket.create_server((host, int(port)))
    listener.listen(128)
    return listener


def address_of(listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"tcp:{host}:{port}"


def accepted(connection: socket.socket, keys: Keys | None, *, seconds: float) -> Channel:
    """The channel of a connection that a listener accepted; the handshake may take ``seconds``.

    Raises:
        RefusedError: the peer is another user of this host, or has no certificate of this run.
        LostError: it went away.
    """
    if connection.family == socket.AF_UNIX:
        _check_user(connection)
        return _unix(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return _secured(connection, keys, server=True, seconds=seconds) if keys else Channel(connection)


def connect(address: str, keys: Keys | None, *, peer: str, seconds: float) -> Channel:
    """A channel to the server named ``peer``, which its certificate must say where there are keys.

    Raises:
        RefusedError: it says something else.
        LostError: nobody answers.
    """
    connection = _dialed(address, seconds)
    if connection.family == socket.AF_UNIX:
        return _unix(connection)
    if keys is None:
        return Channel(connection)
    channel = _secured(connection, keys, server=False, seconds=seconds)
    if channel.identity != peer:
        channel.close()
        raise RefusedError(f"{address} is {channel.identity!r}, not {peer!r}")
    return channel


def _unix(connection: socket.socket) -> Channel:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _ROOM)
    return Channel(connection)


def _dialed(address: str, seconds: float) -> socket.socket:
    kind, _, where = address.partition(":")
    host, _, port = where.rpartition(":")
    connection = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    try:
        connection.settimeout(seconds)
        connection.connect(where if kind == "unix" else (host, int(port)))
        connection.settimeout(None)
        if kind != "unix":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        connection.close()
        raise LostError(f"{address}: {error}") from error
    return connection


def _secured(connection: socket.socket, keys: Keys, *, server: bool, seconds: float) -> Channel:
    connection.settimeout(seconds)
    try:
        secured = keys.context(server=server).wrap_socket(connection, server_side=server)
    except ssl.SSLError as error:
        connection.close()
        raise RefusedError(f"no certificate of this run: {error.reason}") from error
    except OSError as error:
        connection.close()
        raise LostError(str(error)) from error
    return Channel(secured, identity=_common_name(secured))


def _common_name(connection: ssl.SSLSocket) -> str:
    subject: tuple[tuple[tuple[str, str], ...], ...] = (connection.getpeercert() or {}).get("subject", ())  # type: ignore[assignment]
    return next((value for part in subject for key, value in part if key == "commonName"), "")


def _check_user(connection: socket.socket) -> None:
    """The folder admits its owner only; this holds where somebody opened it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != getuid():
        raise RefusedError(f"user {user} of this host is not the one who runs the server")
