"""Listening, connecting and authentication: opens a channel between two processes of a run.

Addresses are strings, ``unix:/folder/name`` inside a host or ``tcp:host:port``. On a Unix socket the kernel tells
whether the peer is a process of the same user, which it must be. Over TCP with credentials, both sides prove by
certificate which process of the run they are. TCP without credentials is allowed only on loopback, where any local user
can connect.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Mapping
from enum import IntEnum
from ipaddress import ip_address
from os import getuid
from pathlib import Path
from typing import Any

from worldsize.errors import ConfigError
from worldsize.net.certificates import Credentials
from worldsize.net.channel import Channel, LostError
from worldsize.net.frames import CommonOperation, RefusedError

_SOCKET_BUFFER_BYTES = 1 << 20  # of a Unix socket, so that its ends wait less for each other; TCP sizes its own
_BACKLOG = 128


def listen(address: str, credentials: Credentials | None) -> socket.socket:
    """Open a listening socket.

    Args:
        address: The address. Port 0 takes a free port, see :func:`address_of`. The folder of a Unix socket should be
            private; an existing file is replaced.
        credentials: The certificate that :func:`accept_channel` will use; None without TLS.

    Raises:
        ConfigError: Other hosts can reach the address, and there are no credentials.
    """
    kind, _, where = address.partition(":")
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX)
        Path(where).unlink(missing_ok=True)  # left by a server that was killed; the folder is ours alone
        listener.bind(where)
    else:
        host, _, port = where.rpartition(":")
        if credentials is None and not ip_address(socket.gethostbyname(host)).is_loopback:
            raise ConfigError(
                f"a server at {host} could be reached by anyone on the network. "
                "Use TLS (strategy.transport=tls), or stay on one host."
            )
        listener = socket.create_server((host, int(port)))
    listener.listen(_BACKLOG)
    return listener


def address_of(listener: socket.socket) -> str:
    """Return the address of a listening socket, for others to connect to (see :mod:`worldsize.net.registry`)."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"tcp:{host}:{port}"


def accept_channel(
    connection: socket.socket, credentials: Credentials | None, *, seconds: float, operations: type[IntEnum]
) -> Channel:
    """Authenticate the peer of a connection that a listener accepted, and return a channel to it.

    Args:
        connection: The socket that ``listener.accept()`` returned.
        credentials: The certificate of this process; None without TLS.
        seconds: The longest duration of the handshake.
        operations: The protocol.

    Raises:
        RefusedError: The peer is another user of this host, or has no certificate of this run.
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
    """Receive the first frame of a connection, JOIN, and return its facts: {"kind", "name", ...}.

    "kind" and "name" are strings, and the name is that of the peer's certificate, if it has one. All other facts are
    unchecked.

    Raises:
        LostError: The peer closed the connection.
        RefusedError: The frame is not a JOIN, or the peer claims the name of another process.
    """
    header = channel.header()
    if header.operation != CommonOperation.JOIN:
        raise RefusedError(f"received {header.operation.name} before JOIN")
    facts = channel.message(header)
    if not isinstance(facts, dict) or not all(isinstance(facts.get(key), str) for key in ("kind", "name")):
        raise RefusedError(f"JOIN says {str(facts)[:200]}")
    if channel.identity is not None and channel.identity != facts["name"]:
        raise RefusedError(f"the certificate of {channel.identity} joins as {facts['name']}")
    return facts


def connect(
    address: str, credentials: Credentials | None, *, peer: str, seconds: float, operations: type[IntEnum]
) -> Channel:
    """Connect to the process named ``peer``, and verify its name if there are credentials.

    Args:
        address: The address at which the peer listens.
        credentials: The certificate of this process; None without TLS.
        peer: The name that the peer's certificate must have.
        seconds: Seconds to wait for the connection, and again for the handshake.
        operations: The protocol.

    Raises:
        RefusedError: Another process answers, or the peer does not accept this one.
        LostError: Nobody answers.
    """
    connection = _dialed(address, seconds)
    if connection.family == socket.AF_UNIX:
        return _unix_channel(connection, operations)
    if credentials is None:
        return Channel(connection, operations=operations)
    channel = _tls_channel(connection, credentials, server=False, seconds=seconds, operations=operations)
    if channel.identity != peer:
        channel.close()
        raise RefusedError(f"{address} is {channel.identity!r}, not {peer!r}")
    return channel


def _unix_channel(connection: socket.socket, operations: type[IntEnum]) -> Channel:
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER_BYTES)
    return Channel(connection, operations=operations)


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


def _tls_channel(
    connection: socket.socket, credentials: Credentials, *, server: bool, seconds: float, operations: type[IntEnum]
) -> Channel:
    connection.settimeout(seconds)
    try:
        secured = credentials.tls_context(server=server).wrap_socket(connection, server_side=server)
    except ssl.SSLError as error:
        connection.close()
        raise RefusedError(f"no certificate of this run: {error.reason}") from error
    except OSError as error:
        connection.close()
        raise LostError(str(error)) from error
    return Channel(secured, operations=operations, identity=_common_name(secured))


def _common_name(connection: ssl.SSLSocket) -> str:
    subject: tuple[tuple[tuple[str, str], ...], ...] = (connection.getpeercert() or {}).get("subject", ())  # type: ignore[assignment]
    return next((value for part in subject for key, value in part if key == "commonName"), "")


def _check_user(connection: socket.socket) -> None:
    """Raise RefusedError unless the peer runs as this user, in case the socket's folder is not private."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != getuid():
        raise RefusedError(f"user {user} of this host is not the one who runs the server")
