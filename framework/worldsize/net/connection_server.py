"""A server of channels: one thread per connection, and each peer is authenticated before it is served."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from itertools import count
from typing import Any, final

from worldsize.net.certificates import Credentials
from worldsize.net.channel import Channel, LostError
from worldsize.net.endpoints import accept_channel, accept_join
from worldsize.net.frames import CommonOperation, RefusedError
from worldsize.net.refusals import RefusalLog

_HANDSHAKE = 10.0  # seconds
_AT_ONCE = 128  # connections that have not joined; one more closes the oldest
_PAUSE = 0.1  # seconds to wait if a connection cannot be accepted: there may be no free file descriptor

Service = Callable[[Channel, Mapping[str, Any]], None]
"""Serves one connection, given its channel and the facts of its JOIN. The connection closes when it returns."""


@final
class ConnectionServer:
    """Accepts connections, authenticates them, and hands each to the service that its JOIN names by "kind".

    A peer is refused if it is not a member of the run, claims the name of another, or sends something for which its
    service raises RefusedError. It is told the reason, which is also logged, and its connection closes; the server
    continues. At most 128 connections that have not joined are open at once: one more closes the oldest.

    Args:
        listener: From :func:`worldsize.net.endpoints.listen`.
        credentials: The certificate of this process; None without TLS.
        services: Services by "kind". A service answers JOIN with WELCOME.
        timeout: Seconds without progress after which a peer is lost; 10 s until it has joined.
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
        """Number of frames, peers and connections that were refused."""
        return self._refusals.count

    def start(self) -> None:
        """Start to accept connections, in threads that end with the process or when the listener is closed."""
        threading.Thread(target=self._accept, daemon=True, name="accept").start()

    def _accept(self) -> None:
        for number in count():
            connection = None
            try:
                connection, _ = self.listener.accept()
                self._await_join(number, connection.dup())
                threading.Thread(target=self.serve, args=(connection, number), daemon=True).start()
            except (OSError, RuntimeError) as error:  # no free descriptor or thread, or the peer has gone already
                if connection is None and self._is_closed(error):
                    return  # the run is over
                self._refusals.add("a connection", error)
                self._forget(number)
                if connection is not None:
                    connection.close()
                time.sleep(_PAUSE)

    def _is_closed(self, error: Exception) -> bool:
        is_gone = isinstance(error, OSError) and error.errno in (errno.EBADF, errno.EINVAL)
        return is_gone or self.listener.fileno() < 0

    def _await_join(self, number: int, connection: socket.socket) -> None:
        """Remember a connection until it has joined, by a duplicate descriptor; close the oldest if too many wait."""
        with self._changing:
            self._joining[number] = connection
            surplus = list(self._joining)[:-_AT_ONCE]
        for each in surplus:
            self._forget(each, end=True)

    def _forget(self, number: int, *, end: bool = False) -> None:
        with self._changing:
            connection = self._joining.pop(number, None)
        if connection is not None:
            with connection, suppress(OSError):
                if end:
                    connection.shutdown(socket.SHUT_RDWR)

    def serve(self, connection: socket.socket, number: int = -1) -> None:
        """Serve one accepted connection from its handshake to its end. ``number`` counts accepted connections."""
        channel, peer = None, "a peer"
        try:
            channel = accept_channel(connection, self._credentials, seconds=_HANDSHAKE, operations=self._operations)
            channel.wait_at_most(_HANDSHAKE)
            facts = accept_join(channel)
            if facts["kind"] not in self._services:
                raise RefusedError(f"JOIN says {str(facts)[:200]}")
            peer = facts["name"]
            self._forget(number)
            channel.wait_at_most(self._timeout)
            self._services[facts["kind"]](channel, facts)
        except LostError:
            pass
        except RefusedError as error:
            self._refuse(channel, peer, error)
        finally:
            self._forget(number)
            (channel or connection).close()

    def _refuse(self, channel: Channel | None, peer: str, error: RefusedError) -> None:
        self._refusals.add(peer, error)
        if channel is not None:
            with suppress(LostError):
                channel.send_message(CommonOperation.REFUSED, str(error))
