"""Determines which transport collectives use; for NCCL from the log that it writes when ranks connect."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
import torch.distributed as dist

from worldsize.core import Cluster, World
from worldsize.observe.nccl_log import NcclLog, parse_nccl

_NAMES = {"P2P": "nvlink", "SHM": "shm", "NET/IB": "ib", "NET/Socket": "socket"}  # of NCCL's transports
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
    """The backend of the collectives, and how its processes are connected.

    The transports and the interface are those of this process; ``ranks`` is the number of processes, of all that train,
    that use each transport.
    """

    backend: str | None
    ranks: NotRequired[Mapping[str, int]]


def audit(world: World, cluster: Cluster, environ: Mapping[str, str], folder: Path) -> Transport:
    """Run a first collective, and return which transports and which interface this process uses for it."""
    if dist.is_initialized():
        dist.all_reduce(torch.ones(1, device=world.device), group=world.group)
    if cluster.backend == "gloo":
        interface = environ.get("GLOO_SOCKET_IFNAME")
        return {
            "backend": "gloo",
            "transports": ["socket"],
            "interface": interface,
            "ranks": {"socket": world.size},
        }
    if cluster.backend != "nccl":  # it does not say
        return {"backend": cluster.backend, "transports": [], "interface": None, "ranks": {}}
    log = folder / f"nccl_{socket.gethostname()}_{os.getpid()}.log"
    used = connections_of(parse_nccl(log.read_text() if log.exists() else ""))
    return {"backend": "nccl", **used, "ranks": _counted(used["transports"], world)}


def _counted(transports: Collection[str], world: World) -> dict[str, int]:
    """Count the processes that use each transport; all ranks must call it."""
    counts = torch.tensor([int(name in transports) for name in _NAMES.values()], device=world.device)
    if dist.is_initialized():
        dist.all_reduce(counts, group=world.group)
    return {name: count for name, count in zip(_NAMES.values(), counts.tolist(), strict=True) if count}


def connections_of(log: NcclLog) -> NcclConnections:
    """Return the transports and the first interface of a process."""
    transports = {name for way in log.connections for start, name in _NAMES.items() if way.startswith(start)}
    interface = log.devices[0].partition(":")[0] if log.devices else None
    return {"transports": sorted(transports), "interface": interface}


def transport_warning(transport: Transport, cluster: Cluster) -> str | None:
    """Compose a warning if the transport of any process is slower than what the cluster declares.

    It declares a fabric by its adapters (``cluster.hca``), or by a bandwidth between nodes that no socket has.
    """
    ranks = transport.get("ranks", {})
    slow = max(ranks.get("socket", 0), int("socket" in transport["transports"]))
    if transport["backend"] != "nccl" or not slow:
        return None
    link = cluster.links.get("network")
    if cluster.hca is not None:
        declared = f"InfiniBand (cluster.hca={cluster.hca})"
    elif link is not None and link.bandwidth > _SOCKETS_AT_MOST:
        declared = f"{link.bandwidth / 1e9:g} GB/s"
    else:
        return None
    fast = ranks.get("ib", 0)
    who = f" in {slow} processes, and InfiniBand in {fast}" if fast else ""
    where = f" on {transport['interface']}" if "socket" in transport["transports"] else ""
    return (
        f"NCCL uses plain sockets{where}{who}, but the cluster declares {declared} between nodes. Look at "
        "cluster.interface and cluster.hca, and whether the container sees the fabric."
    )


def write(path: Path, transport: Transport) -> None:
    """Write the result of :func:`audit` as JSON, replacing the file."""
    path.write_text(json.dumps(transport))
