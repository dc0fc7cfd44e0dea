"""Lists what a process has left open: child processes, and ports on which it listens (Linux)."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

_LISTEN = "0A"  # state of a socket in /proc/net/tcp, proc(5)
LOOPBACK = ("127.0.0.1", "::1")


def children() -> set[int]:
    """Return the process ids of this process's children."""
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(map(int, task.read_text().split()))


def listening(*, of_all: bool = False) -> dict[str, tuple[str, int]]:
    """Return the addresses and ports on which this process listens, each by the inode of its socket.

    The inode tells a port of this process from the same port that another process has taken since.

    Args:
        of_all: Whether to return those of all processes of this machine.
    """
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    own = _sockets()
    return {
        line[9]: _address(line[1]) for line in lines if line[3] == _LISTEN and (of_all or f"socket:[{line[9]}]" in own)
    }


def _sockets() -> set[str]:
    targets = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            targets.add(str(link.readlink()))
    return targets


def _address(text: str) -> tuple[str, int]:
    """Parse an address such as "0100007F:1F90": 32-bit words of the host's byte order, and a port."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)), int(port, 16)
