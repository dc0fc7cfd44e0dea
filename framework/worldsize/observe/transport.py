"""Determines which transport collectives use; for NCCL from the log that it writes when ranks connect."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist

from worldsize.core import Cluster, World
from worldsize.observe.nccl_log import NcclLog, parse_nccl

_SOCKETS_AT_MOST = 5e9  # bytes per second; a link declared faster is not a plain socket


def listen_to_nccl(folder: Path) -> dict[str, str]:
    """Return the environment variables that make NCCL log its connections to a file per process in ``folder``."""
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": str(folder / "nccl_%h_%p.log"),
    }


class NcclConnections(TypedDict):
    """The transports that NCCL uses, sorted ("nvlink", which is its P2P, "shm", "ib", "socket"), and its interface."""

    transports: list[str]
    interface: str | None


class Transport(NcclConnections):
    """The backend of the collectives, and how its processes are connected."""

    backend: str | None


def audit(world: World, cluster: Cluster, environ: Mapping[str, str], folder: Path) -> Transport:
    """Run a first collective, and return which transports and which interface this process uses for it."""
    if dist.is_initialized():
        dist.all_reduce(torch.ones(1, device=world.device), group=world.group)
    if cluster.backend != "nccl":
        interface = environ.get("GLOO_SOCKET_IFNAME")
        return {"backend": cluster.backend, "transports": ["socket"], "interface": interface}
    log = folder / f"nccl_{socket.gethostname()}_{os.getpid()}.log"
    return {"backend": "nccl", **connections_of(parse_nccl(log.read_text() if log.exists() else ""))}


def connections_of(log: NcclLog) -> NcclConnections:
    """Return the transports and the first interface of a process."""
    names = {"P2P": "nvlink", "SHM": "shm", "NET/IB": "ib", "NET/Socket": "socket"}
    transports = {name for way in log.connections for start, name in names.items() if way.startswith(start)}
    interface = log.devices[0].partition(":")[0] if log.devices else None
    return {"transports": sorted(transports), "interface": interface}


def transport_warning(transport: Transport, cluster: Cluster) -> str | None:
    """Compose a warning if the transport is slower than what the cluster declares."""
    link = cluster.links.get("network")
    if transport["backend"] != "nccl" or "socket" not in transport["transports"]:
        return None
    if link is None or link.bandwidth <= _SOCKETS_AT_MOST:
        return None
    return (
        f"NCCL uses plain sockets on {transport['interface']}, but the cluster declares {link.bandwidth / 1e9:g} GB/s "
        "between nodes. Look at cluster.interface and cluster.hca, and whether the container sees the fabric."
    )


def write(path: Path, transport: Transport) -> None:
    """Write the result of :func:`audit` as JSON, replacing the file."""
    path.write_text(json.dumps(transport))
