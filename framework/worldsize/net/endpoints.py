"""Opens authenticated channels between two processes of a run, and serves them.

Addresses are strings: ``unix:/folder/name`` inside a host, or ``tcp:host:port``. On a Unix socket, the kernel reports
the peer's user, which must be this process's user. Over TCP with credentials, both sides prove their names in the run
with certificates. TCP without credentials is allowed only on loopback, where any local user can connect.

:class:`ConnectionServer` authenticates each peer, and serves each connection in its own thread.
"""

from __future__ import annotations

import errno
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from ipaddress import ip_address
from itertools import count
from os import getuid
from pathlib import Path
from typing import Any, final

from worldsize.errors import ConfigError
from worldsize.net.agent_connection import RefusalLog
from worldsize.net.channel import Channel, LostError
from worldsize.net.credentials import Credentials
from worldsize.net.frames import CommonOperation, RefusedError

_SOCKET_BUFFER_BYTES = 1 << 20  # for Unix sockets, to reduce waiting between both ends; TCP sizes its own buffers
_BACKLOG = 128


def open_listener(address: str, credentials: Credentials | None) -> socket.socket:
    """Open a listening socket.

    Args:
        address: The address. Port 0 selects a free port, see :func:`get_listener_address`. The folder of a Unix
            socket should be private; an existing file is replaced.
        credentials: The credentials that :func:`accept_channel` will use; None without TLS.

    Raises:
        ConfigError: The address is reachable from other hosts, but credentials are missing.
    """
    kind, _, where = address.partition(":")
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        Path(where).unlink(missing_ok=True)  # left by a killed server; only this run uses the folder
        listener.bind(where)
    else:
        host, _, port = where.rpartition(":")
        if credentials is None and not ip_address(socket.gethostbyname(host)).is_loopback:
            raise ConfigError(
                f"a server on {host} requires TLS, since the address is reachable from the network. "
                "Set strategy.transport=tls, or use a single host."
            )
        listener = socket.create_server((host, int(port)))
    listener.listen(_BACKLOG)
    return listener


def get_listener_address(listener: socket.socket) -> str:
    """Return a listening socket's address, for :mod:`worldsize.net.registry`."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"tcp:{host}:{port}"


def accept_channel(
    connection: socket.socket, credentials: Credentials | None, *, seconds: float, operations: type[IntEnum]
) -> Channel:
    """Authenticate the peer of an accepted connection, and return a channel to it.

    Args:
        connection: The socket that ``listener.accept()`` returned.
        credentials: The credentials of this process; None without TLS.
        seconds: Timeout of the handshake.
        operations: The protocol.

    Raises:
        RefusedError: The peer runs as another user on this host, or lacks a certificate from this run.
        LostError: The peer closed the connection, or was silent for too long.
    """
    if connection.family == socket.AF_UNIX:
        _check_user(connection)
        return _unix_channel(connection, operations)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if credentials is None:
        return Channel(connection, operations=operations)
    return _tls_channel(connection, credentials, server=True, seconds=seconds, operations=operations)


def accept_join(channel: Channel) -> Mapping[str, Any]:
    """Receive a connection's first frame, JOIN; return its facts: {"kind", "name", ...}.

    "kind" and "name" are strings, and the name matches the peer's certificate, if it has one. All other facts are
    unchecked.

    Raises:
        LostError: The connection is lost.
        RefusedError: The frame is not a valid JOIN, or the peer claims a name that differs from its certificate.
    """
    header = channel.receive_header()
    if header.operation != CommonOperation.JOIN:
        raise RefusedError(f"expected JOIN, got {header.operation.name}")
    facts = channel.receive_message(header)
    if not isinstance(facts, dict) or not all(isinstance(facts.get(key), str) for key in ("kind", "name")):
        raise RefusedError(f"invalid JOIN: {str(facts)[:200]}")
    if channel.identity is not None and channel.identity != facts["name"]:
        raise RefusedError(f"name mismatch: the certificate has {channel.identity}, JOIN has {facts['name']}")
    return facts


def connect_channel(
    address: str, credentials: Credentials | None, *, peer: str, seconds: float, operations: type[IntEnum]
) -> Channel:
    """Connect to the process named ``peer``; with credentials, verify its name.

    Args:
        address: The address at which the peer listens.
        credentials: The credentials of this process; None without TLS.
        peer: The expected name in the peer's certificate.
        seconds: Timeout of the connection attempt, and of the handshake.
        operations: The protocol.

    Raises:
        RefusedError: Another process answers, or the TLS handshake fails.
        LostError: The connection fails.
    """
    connection = _connect_socket(address, seconds)
    if connection.family == socket.AF_UNIX:
        return _unix_channel(connection, operations)
    if credentials is None:
        return Channel(connection, operations=operations)
    channel = _tls_channel(connection, credentials, server=False, seconds=seconds, operations=operations)
    if channel.identity != peer:
        channel.close()
        raise RefusedError(f"{address}: expected the peer {peer!r}, got {channel.identity!r}")
    return channel


def _unix_channel(connection: socket.socket, operations: type[IntEnum]) -> Channel:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    return Channel(connection, operations=operations)


def _connect_socket(address: str, seconds: float) -> socket.socket:
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


def _tls_channel(
    connection: socket.socket, credentials: Credentials, *, server: bool, seconds: float, operations: type[IntEnum]
) -> Channel:
    connection.settimeout(seconds)
    try:
        secured = credentials.tls_context(server=server).wrap_socket(connection, server_side=server)
    except ssl.SSLError as error:
        connection.close()
        raise RefusedError(f"TLS handshake failed, certificate not issued by this run: {error.reason}") from error
    except OSError as error:
        connection.close()
        raise LostError(str(error)) from error
    return Channel(secured, operations=operations, identity=_common_name(secured))


def _common_name(connection: ssl.SSLSocket) -> str:
    subject: tuple[tuple[tuple[str, str], ...], ...] = (connection.getpeercert() or {}).get("subject", ())  # type: ignore[assignment]
    return next((value for part in subject for key, value in part if key == "commonName"), "")


def _check_user(connection: socket.socket) -> None:
    """Raise RefusedError unless the peer is this user, even if the folder is not private."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != getuid():
        raise RefusedError(f"the peer runs as user {user}, not as the server's user")


_HANDSHAKE = 10.0  # timeout of a handshake in seconds
_AT_ONCE = 128  # maximum connections that have not joined; a new one closes the oldest
_PAUSE = 0.1  # seconds to wait after accept() failed, such as for lack of file descriptors

Service = Callable[[Channel, Mapping[str, Any]], None]
"""Serves one connection, given its channel and the facts of its JOIN. The connection closes when it returns."""


@final
class ConnectionServer:
    """Authenticates connections, and passes each to the service for its JOIN's "kind".

    A peer is refused if it is not a member of the run, claims a name that differs from its certificate, or makes its
    service raise RefusedError. The server logs the reason, sends it to the peer, closes the connection and continues.
    At most 128 connections may be waiting to join; a new one closes the oldest.

    Args:
        listener: Listening socket from :func:`worldsize.net.endpoints.open_listener`.
        credentials: The credentials of this process; None without TLS.
        services: Services by "kind". A service must answer JOIN with WELCOME.
        timeout: Seconds without progress after which a peer counts as lost; 10 s until it has joined.
        operations: The protocol.
    """

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials | None,
        services: Mapping[str, Service],
        *,
        timeout: float,
        operations: type[IntEnum],
    ) -> None:
        self.listener = listener
        self._refusals = RefusalLog()
        self._credentials, self._services = credentials, services
        self._timeout, self._operations = timeout, operations
        self._joining: dict[int, socket.socket] = {}  # connections that have not joined, oldest first
        self._changing = threading.Lock()

    @property
    def refused(self) -> int:
        """Number of refused frames, peers and connections."""
        return self._refusals.count

    def start(self) -> None:
        """Start accepting connections in daemon threads, until the listener is closed."""
        threading.Thread(target=self._accept_connections, daemon=True, name="accept").start()

    def _accept_connections(self) -> None:
        for number in count():
            connection = None
            try:
                connection, _ = self.listener.accept()
                self._await_join(number, connection.dup())
                threading.Thread(target=self.serve, args=(connection, number), daemon=True).start()
            except (OSError, RuntimeError) as error:  # out of descriptors or threads, or the peer disconnected
                if connection is None and self._is_closed(error):
                    return  # the run is over
                self._refusals.record_refusal("a connection", error)
                self._untrack_connection(number)
                if connection is not None:
                    connection.close()
                time.sleep(_PAUSE)

    def _is_closed(self, error: Exception) -> bool:
        is_gone = isinstance(error, OSError) and error.errno in (errno.EBADF, errno.EINVAL)
        return is_gone or self.listener.fileno() < 0

    def _await_join(self, number: int, connection: socket.socket) -> None:
        """Track a connection until it joins; above the limit, close the oldest one.

        ``connection`` is a duplicate with its own descriptor.
        """
        with self._changing:
            self._joining[number] = connection
            surplus = list(self._joining)[:-_AT_ONCE]
        for each in surplus:
            self._untrack_connection(each, end=True)

    def _untrack_connection(self, number: int, *, end: bool = False) -> None:
        with self._changing:
            connection = self._joining.pop(number, None)
        if connection is not None:
            with connection, suppress(OSError):
                if end:
                    connection.shutdown(socket.SHUT_RDWR)

    def serve(self, connection: socket.socket, number: int = -1) -> None:
        """Serve an accepted connection from the handshake until it closes; ``number`` is its index."""
        channel, peer = None, "a peer"
        try:
            channel = accept_channel(connection, self._credentials, seconds=_HANDSHAKE, operations=self._operations)
            channel.wait_at_most(_HANDSHAKE)
            facts = accept_join(channel)
            if facts["kind"] not in self._services:
                raise RefusedError(f"invalid JOIN: {str(facts)[:200]}")
            peer = facts["name"]
            self._untrack_connection(number)
            channel.wait_at_most(self._timeout)
            self._services[facts["kind"]](channel, facts)
        except LostError:
            pass
        except RefusedError as error:
            self._refuse_peer(channel, peer, error)
        finally:
            self._untrack_connection(number)
            (channel or connection).close()

    def _refuse_peer(self, channel: Channel | None, peer: str, error: RefusedError) -> None:
        self._refusals.record_refusal(peer, error)
        if channel is not None:
            with suppress(LostError):
                channel.send_message(CommonOperation.REFUSED, str(error))
