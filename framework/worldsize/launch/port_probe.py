"""Tests whether hosts can reach each other: each opens a port, to which all others connect."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Self, final

from worldsize.net.bounded_io import receive_line

_PATIENCE = 3.0  # seconds
_AT_ONCE = 32
_LONGEST = 32  # bytes of a node's number


@final
class PortProbe:
    """An open port at ``address`` that sends every client the number of its node.

    Raises:
        OSError: this host has no such address.
    """

    def __init__(self, address: str, node: int) -> None:
        self._listener = socket.create_server((address, 0), backlog=_AT_ONCE)
        self._node = node
        self._thread = threading.Thread(target=self._serve, daemon=True, name="probe")
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which must end before this process forks
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    connection.settimeout(_PATIENCE)
                    connection.sendall(f"{self._node}\n".encode())


def probe(address: str, port: int, node: int) -> str | None:
    """Return why the port of ``node`` cannot be reached, or None if it can."""
    try:
        with socket.create_connection((address, port), timeout=_PATIENCE) as connection:
            line = receive_line(connection, at_most=_LONGEST, deadline=time.monotonic() + _PATIENCE)
    except OSError as error:
        return str(error)
    said = line.decode("latin-1").strip().encode("unicode_escape").decode()  # another program
    return None if said == str(node) else f"another process answers there ({said or 'nothing'})"


def probe_all(probes: Sequence[Mapping[str, int | str]], own: int) -> dict[int, str]:
    """Map each node whose port cannot be reached from here to the reason. ``own`` is this node."""
    others = [(str(each["address"]), int(each["port"]), int(each["node"])) for each in probes if each["node"] != own]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        refusals = pool.map(lambda other: probe(*other), others)
        return {node: why for (_, _, node), why in zip(others, refusals, strict=True) if why}
