"""Reads the log of one process's NCCL: its network, its connections and its warnings.

The lines are those of NCCL 2.10 and newer; see "Logging" in its documentation,
https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import final

# newer versions begin warnings with the time in brackets, and warnings name the place in NCCL's source; since 2.30 a
# name in parentheses follows it
_LINE = re.compile(
    r"(?:\[[^\]]*\] )?(?P<host>[^\s:\[\]]+):\d+:\d+ \[-?\d+\] "
    r"(?:(?P<place>\S+:\d+) (?:\([^)]*\) )?)?NCCL (?P<text>.*)"
)
_VERSION = re.compile(r"NCCL version (\S+)")
_COMMUNICATOR = re.compile(r"\brank (\d+) nranks (\d+)\b.* - Init (START|COMPLETE)")
_NETWORK = re.compile(r"NET/(?P<kind>IB|Socket) ?: Using (?P<devices>\[.*)")
_DEVICE = re.compile(r"\[\d+\](?P<name>[^\s:]+)(?P<port>:\d+/\w+)?")
_CONNECTION = re.compile(r"Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\](?: \[\w+\])? via (?P<way>\S+)")


@final
@dataclass
class NcclLog:
    """The facts in the log of one process."""

    host: str = ""
    version: str | None = None
    rank: int | None = None
    """Its rank in the largest communicator that it began to connect."""
    size: int = 0
    """Ranks of that communicator."""
    is_connected: bool = False
    """Whether that communicator was connected."""
    network: str | None = None
    """ "IB", "Socket" or the name of a plugin."""
    devices: tuple[str, ...] = ()
    """Devices of the network by NCCL's numbers, such as "mlx5_0:1/IB" or "eth0"."""
    bootstrap: str | None = None
    """The interface on which NCCL sets up its connections."""
    connections: Counter[str] = field(default_factory=Counter)
    """Number of connections by their way as NCCL names it, such as "P2P/CUMEM" or "NET/IB/0/GDRDMA"."""
    warnings: list[str] = field(default_factory=list)


def parse_nccl(text: str) -> NcclLog:
    """Parse the log of one process; lines that are not NCCL's are left out."""
    log = NcclLog()
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            if version := _VERSION.match(line):
                log.version = version[1]
            continue
        log.host, said = match["host"], match["text"]
        if said.startswith("WARN "):
            log.warnings.append(" ".join(filter(None, (match["place"], said.removeprefix("WARN ").strip()))))
        else:
            _take(log, said)
    return log


def _take(log: NcclLog, text: str) -> None:
    if match := _CONNECTION.search(text):
        log.connections[re.sub(r"\(\d+\)", "", match["way"])] += 1
    elif match := _COMMUNICATOR.search(text):
        if int(match[2]) >= log.size:
            log.rank, log.size, log.is_connected = int(match[1]), int(match[2]), match[3] == "COMPLETE"
    elif match := _NETWORK.search(text):
        named = match["devices"].partition("; OOB")[0]
        log.devices = tuple(each["name"] + (each["port"] or "") for each in _DEVICE.finditer(named))
    elif match := re.search(r"Bootstrap ?: Using (?:\[0\])?([^\s:]+)", text):
        log.bootstrap = match[1]
    elif match := re.search(r"Using network (\S+)", text):
        log.network = match[1]
    elif match := _VERSION.search(text):
        log.version = match[1]
