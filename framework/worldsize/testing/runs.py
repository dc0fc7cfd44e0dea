"""Real runs for tests of recipes, launchers and loggers, and checks for leaked resources."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worldsize.moved import resolve_renamed


@dataclass(frozen=True)
class CompletedRun:
    """The results of a completed run, read from its folder."""

    folder: Path

    @property
    def result(self) -> Mapping[str, Any]:
        """The contents of ``result.json``."""
        result: dict[str, Any] = json.loads((self.folder / "result.json").read_text())
        return result

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the run's last evaluation, by name."""
        metrics: dict[str, float] = self.result["metrics"]
        return metrics


def train(*overrides: str, root: Path) -> CompletedRun:
    """Train in the working directory, with runs in ``root``, by default without a logger.

    Raises:
        RuntimeError: the run failed; the message has its output.
    """
    name = f"test_{secrets.token_hex(4)}"
    quiet = [] if any(word.startswith("logger=") for word in overrides) else ["logger=none"]
    own = [*quiet, f"run.root={root}", f"run.name={name}"]
    done = subprocess.run(
        [sys.executable, "-m", "worldsize", "train", *overrides, *own], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"train {' '.join(overrides)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    (folder,) = root.glob(f"*/{name}")
    return CompletedRun(folder)


_LISTEN = "0A"  # socket state LISTEN in /proc/net/tcp, see proc(5)
LOOPBACK = ("127.0.0.1", "::1")


def children() -> set[int]:
    """Return the ids of this process's children."""
    task = Path(f"/proc/self/task/{os.getpid()}/children")
    return set(map(int, task.read_text().split()))


def listening(*, of_all: bool = False) -> dict[str, tuple[str, int]]:
    """Return the addresses and ports that this process listens on, by socket inode.

    The inode distinguishes a port from the same port reopened later by a different process.

    Args:
        of_all: Whether to include all processes of this machine.
    """
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    own = _list_sockets()
    return {
        line[9]: _parse_address(line[1])
        for line in lines
        if line[3] == _LISTEN and (of_all or f"socket:[{line[9]}]" in own)
    }


def _list_sockets() -> set[str]:
    targets = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            targets.add(str(link.readlink()))
    return targets


def _parse_address(text: str) -> tuple[str, int]:
    """Parse an address such as "0100007F:1F90": 32-bit words in host byte order, and a port."""
    host, _, port = text.partition(":")
    words = [bytes.fromhex(host[start : start + 8])[::-1] for start in range(0, len(host), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)), int(port, 16)


def __getattr__(name: str) -> Any:
    return resolve_renamed(__name__, name)
