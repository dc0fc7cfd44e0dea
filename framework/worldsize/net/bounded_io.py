"""Receives from untrusted peers: a limited number of bytes, all before one deadline."""

from __future__ import annotations

import math
import select
import socket
import time


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
