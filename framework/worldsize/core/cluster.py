"""The shape of a run: links, nodes, roles, the place of a process among the others, and its container image."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, final

from worldsize.core.limits import COUNT, NO_KEY, SECONDS, SHARE, Key, Range

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


Pinning = Literal["auto", "none", "numa", "exclusive"]


@dataclass(frozen=True)
class Link:
    """One tier of the interconnect. A link of tier "device" or "node" belongs to one rank, "network" to one node.

    With tiers in between (:attr:`Cluster.tiers`), the link of a tier belongs to one unit of the tier below: that of
    "rack" to one node, which it joins to the others of its rack, and "network" to one unit of the last.

    Attributes:
        bandwidth: Bytes/s in each direction; the ranks of a node share the bandwidth of its network link.
        latency: Seconds.
        gap: Least seconds of a round in which every rank sends one message and receives one, however small (g of
            LogP, Culler et al. 1993, doi:10.1145/155332.155333). It exceeds the latency where processors limit it.
        incast: Fraction of the bandwidth, 0 to 1, that is left when all ranks send to all at once (Phanishayee et al.,
            FAST 2008).
    """

    bandwidth: Annotated[float, Range(above=0, hint="it is in bytes a second")]
    latency: Annotated[float, Range(least=0, hint="it is in seconds")]
    gap: Annotated[float, Range(least=0, hint="it is in seconds")] = 0.0
    incast: Annotated[float, SHARE] = 1.0


@dataclass(frozen=True)
class Spot:
    """A node that its provider may reclaim.

    Attributes:
        mtbf_hours: Mean hours between two failures of one node, reclaims among them.
        price_per_hour: Price of one node for an hour, in the currency of the cluster's; None: not known.
    """

    mtbf_hours: Annotated[float, Range(above=0), Key(default=None)]
    price_per_hour: Annotated[float | None, Range(least=0)] = None


@dataclass(frozen=True)
class Cluster:
    """The machines that a launcher offers.

    Attributes:
        name: Name of the configuration, such as "ssh".
        nodes: Number of hosts.
        processes: Processes on all nodes together; every node has the same number.
        device: Kind of device on which processes train, by torch's name: "cpu", "cuda", "xpu".
        backend: Backend of torch.distributed, such as "gloo" or "nccl".
        threads: Threads of each process; None: the node's cores divided by its processes.
        cpus_per_process: CPUs that each process needs, for its threads and for the processes that load its data.
        timeout: Seconds that a process waits for its peers.
        interface: Network interface of the collectives; None: the one with a route to the first node.
        hca: InfiniBand adapters that NCCL may use (NCCL_IB_HCA).
        links: Links by tier: "device", "node", those of ``tiers``, "network".
        tiers: Tiers between a node and the network, the innermost first: nodes of one unit by the tier's name, such as
            {"rack": 16, "pod": 64}. The nodes of a unit are consecutive. The key takes a mapping, too: ``nodes`` and
            the keys of a link.
        device_memory: Bytes that one process may use, for planning; None: the memory of this machine.
        price_per_hour: Price of one node for an hour, in any currency, for planning.
        mtbf_hours: Mean hours between two failures of one node, for planning and ``checkpoint.every=auto``; None: not
            known.
        peak_flops: Dense operations a second of one process's device, for the MFU; None: that of a known GPU.
        debug: Whether NCCL and torch tell what they do, in the logs of the processes.
        spot_market: What nodes of this kind cost and how often they fail on the spot market; None: not known.
        min_processes: Least processes with which a run that heals goes on; None: 1.
        spares: Further processes of a run that heals, which wait to take the places of those that die.
        spare_nodes: Further nodes of such a run, whose processes wait to take the places of those of a lost node; of
            ``hosts`` they are the last.
        pin: Whether a process keeps to the cores and the memory of a NUMA node ("numa") or to a part of these that is
            its own ("exclusive"); "auto": as "numa" where a machine has several such nodes.
    """

    name: str
    nodes: Annotated[int, Range(least=1, most=1_000_000), Key(default=1)]
    processes: Annotated[int, Range(most=1_000_000), Key(default=None)]
    device: Annotated[str, Key(str | None, default="cpu")]
    backend: Annotated[str, Key(default=None)]
    threads: Annotated[int | None, Range(least=1, most=4096)] = None
    cpus_per_process: Annotated[int, NO_KEY] = 1
    timeout: Annotated[float, SECONDS] = 600.0
    interface: str | None = None
    hca: str | None = None
    links: Mapping[str, Link] = field(default_factory=dict)
    tiers: Annotated[Mapping[str, int], Key(dict[str, Any])] = field(default_factory=dict)
    device_memory: Annotated[float | None, Range(above=0, hint="it is in bytes")] = None
    price_per_hour: Annotated[float | None, Range(least=0)] = None
    mtbf_hours: Annotated[float | None, Range(above=0)] = None
    spot_market: Spot | None = None
    min_processes: Annotated[int | None, COUNT] = None
    spares: Annotated[int, Range(least=0, most=256)] = 0
    spare_nodes: Annotated[int, Range(least=0, most=256)] = 0
    peak_flops: Annotated[float | None, Range(above=0, hint="it is in operations a second")] = None
    debug: bool = False
    pin: Annotated[Pinning, Key(default="auto")] = "none"

    @property
    def processes_per_node(self) -> int:
        """Number of processes on each node."""
        return self.processes // self.nodes

    @property
    def cpus_per_node(self) -> int:
        """Number of CPUs that the processes of a node need."""
        return self.processes_per_node * self.cpus_per_process

    @property
    def all_nodes(self) -> int:
        """Number of nodes, with those that wait."""
        return self.nodes + self.spare_nodes

    @property
    def waiting(self) -> int:
        """Number of processes that wait at first: those of the spare nodes, then the other spares."""
        return self.spare_nodes * self.processes_per_node + self.spares


@dataclass(frozen=True)
class Role:
    """A group of processes with one task, and what happens when one of them dies."""

    processes: int
    """Number of processes, over all nodes."""
    restart: Literal["gang", "individual", "heal"] = "gang"
    """What happens when a process dies: all of the gang restart, that process alone does, or the others take over its
    part of each step and go on."""
    serves: bool = False
    """Whether its processes run :meth:`Strategy.serve`, without a process group, instead of training a replica."""
    min_processes: int | None = None
    """Number of processes that must be alive for the run to continue without the dead ones; None: all."""
    block: int = 1
    """Processes that together train one part of the data: those of a role that heals train in whole blocks of so many,
    and those that are too many wait."""
    together: int = 1
    """Processes of a block that must be on one host: a block consists of groups of so many, each of which is."""


@dataclass(frozen=True)
class World:
    """The place of this process among the others of its run.

    Attributes:
        role: Name of the process's role, such as "worker".
        rank: Rank within the role, from 0. A recipe may use only ``rank`` and ``size``.
        size: Number of processes of the role.
        global_rank: Rank among all processes of the run, from 0.
        world_size: Number of processes of the run, over all roles.
        local_rank: Rank among the processes of this node, from 0.
        node_rank: Index of this node, from 0.
        device: Device on which the process trains.
        groups: Process groups by name: all processes that train ("all"), each role, and on accelerators its processes
            with gloo ("host/worker"), this node. If all train, also those with the same local rank on all nodes
            ("across"), and by tier ("tier/rack", ..., "tier/network") those with the same place in the units below.
    """

    role: str
    rank: int
    size: int
    global_rank: int
    world_size: int
    local_rank: int
    node_rank: int
    device: torch.device
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)

    @staticmethod
    def alone(device: torch.device) -> World:
        """Return the world of one worker on ``device``, with no process group."""
        return World("worker", 0, 1, 0, 1, 0, 0, device)

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of this role; ``None`` if the run has no process groups."""
        return self.groups.get(self.role)


_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})\Z")
_FILES = (".sif", ".sqsh", ".squashfs")


@final
@dataclass(frozen=True)
class ContainerImage:
    """An image, and what tells it from others of its name.

    Attributes:
        name: Its name as it was given, such as "trainer:1" or "trainer@sha256:...", or the path of a file.
        digest: "sha256:" and 64 hexadecimal digits: in its name, or the SHA-256 of the file. None: a tag names it,
            which may be another image tomorrow, or this machine does not see the file.
    """

    name: str
    digest: str | None

    @staticmethod
    def named(name: str) -> ContainerImage:
        """Return the image of a name; a file is read whole."""
        if match := _DIGEST.search(name):
            return ContainerImage(name, match[1])
        file = Path(name)
        if is_image_file(name) and file.is_file():
            status = file.stat()
            return ContainerImage(name, f"sha256:{_digest(file, status.st_mtime_ns, status.st_size)}")
        return ContainerImage(name, None)


def is_image_file(name: str) -> bool:
    """Return whether an image's name is the path of a file, as Apptainer and enroot have them."""
    return "://" not in name and name.endswith(_FILES)


@cache
def _digest(file: Path, time_ns: int, size: int) -> str:
    """Hash ``file``; its time and size distinguish it from what was there before."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
