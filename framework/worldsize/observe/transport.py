"""Determines the transport of collectives; for NCCL, from its log of connecting ranks."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NotRequired, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from worldsize.collectives.group import start_collective
from worldsize.core import Cluster, World
from worldsize.devices import backend_for
from worldsize.files import open_regular
from worldsize.observe.nccl_log import NcclLog, parse_nccl

_NAMES = {"P2P": "nvlink", "SHM": "shm", "NET/IB": "ib", "NET/Socket": "socket"}  # by prefix of NCCL's names
_LONGEST = 16 << 20  # maximum bytes to read of NCCL's log
_SOCKETS_AT_MOST = 5e9  # bytes per second; a link declared faster is not a plain socket


def nccl_log(folder: Path, *, host: str, process: str, attempt: int | None) -> Path:
    """Return the path of one process's NCCL log in ``folder``.

    ``attempt``: number of the run's attempt. None if unknown, i.e. without a launching process.
    """
    of_attempt = "" if attempt is None else f".attempt_{attempt}"
    return folder / f"nccl_{host}_{process}{of_attempt}.log"


def listen_to_nccl(folder: Path, *, attempt: int | None) -> dict[str, str]:
    """Return environment variables that make NCCL log its connections to :func:`nccl_log`."""
    return {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": str(nccl_log(folder, host="%h", process="%p", attempt=attempt)),
    }


class NcclConnections(TypedDict):
    """NCCL's sorted transports ("nvlink" for P2P, "shm", "ib", "socket") and network interface."""

    transports: list[str]
    interface: str | None


class Transport(NcclConnections):
    """The backend of the collectives, and how its processes are connected.

    Transports and interface are those of this process; ``ranks`` is the number of training processes per transport.
    """

    backend: str | None
    ranks: NotRequired[Mapping[str, int]]


def detect_transport(world: World, cluster: Cluster, environ: Mapping[str, str], log: Path) -> Transport:
    """Return this process's transports and interface, for NCCL after a first collective.

    ``log``: this process's NCCL log; see :func:`nccl_log`.
    """
    backend = backend_for(cluster.backend, cluster.device)
    if backend == "gloo":
        interface = environ.get("GLOO_SOCKET_IFNAME")
        return {
            "backend": "gloo",
            "transports": ["socket"],
            "interface": interface,
            "ranks": {"socket": world.size},
        }
    if backend != "nccl":  # other backends do not report them
        return {"backend": cluster.backend, "transports": [], "interface": None, "ranks": {}}
    _all_reduce(torch.ones(1, device=world.device), world)
    text = b""
    with suppress(FileNotFoundError), open_regular(log) as file:
        text = file.read(_LONGEST)
    used = extract_connections(parse_nccl(text.decode(errors="replace")))
    return {"backend": "nccl", **used, "ranks": _count_ranks(used["transports"], world)}


def _count_ranks(transports: Collection[str], world: World) -> dict[str, int]:
    """Count the processes that use each transport. All ranks must call it."""
    counts = torch.tensor([int(name in transports) for name in _NAMES.values()], device=world.device)
    _all_reduce(counts, world)
    return {name: count for name, count in zip(_NAMES.values(), counts.tolist(), strict=True) if count}


def _all_reduce(values: Tensor, world: World) -> None:
    """All-reduce ``values`` in place; raises if the gang ends meanwhile."""
    if dist.is_initialized():
        start_collective(dist.all_reduce, values, group=world.group).wait()


def extract_connections(log: NcclLog) -> NcclConnections:
    """Return the transports and the first interface of a process."""
    transports = {name for way in log.connections for start, name in _NAMES.items() if way.startswith(start)}
    interface = log.devices[0].partition(":")[0] if log.devices else None
    return {"transports": sorted(transports), "interface": interface}


def transport_warning(transport: Transport, cluster: Cluster) -> str | None:
    """Compose a warning if any process uses a slower transport than the cluster declares.

    A cluster declares a fast fabric by ``cluster.hca``, or by a bandwidth above 5 GB/s between nodes, for any tier or
    for the whole network.
    """
    ranks = transport.get("ranks", {})
    slow = max(ranks.get("socket", 0), int("socket" in transport["transports"]))
    if transport["backend"] != "nccl" or not slow:
        return None
    links = [cluster.links[tier].bandwidth for tier in (*cluster.tiers, "network") if tier in cluster.links]
    if cluster.hca is not None:
        declared = f"InfiniBand (cluster.hca={cluster.hca})"
    elif max(links, default=0.0) > _SOCKETS_AT_MOST:
        declared = f"{max(links) / 1e9:g} GB/s"
    else:
        return None
    fast = ranks.get("ib", 0)
    who = f" in {slow} processes, and InfiniBand in {fast}" if fast else ""
    where = f" on {transport['interface']}" if "socket" in transport["transports"] else ""
    return (
        f"NCCL uses plain sockets{where}{who}, but the cluster declares {declared} between nodes. Check "
        "cluster.interface and cluster.hca, and that the fabric is visible in the container."
    )


def write_transport(path: Path, transport: Transport) -> None:
    """Write the result of :func:`detect_transport` as JSON, replacing the file."""
    path.write_text(json.dumps(transport))
