"""Shape of a run: links, nodes, roles, ranks, process groups and the container image."""

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
    """One tier of the interconnect.

    "device" and "node" links belong to one rank, "network" links to one node. With intermediate tiers
    (:attr:`Cluster.tiers`), each unit of the tier below has one link: the "rack" link connects a node to the other
    nodes of its rack, and "network" connects the units of the outermost tier.

    Attributes:
        bandwidth: Bytes/s in each direction; the ranks of a node share the bandwidth of its network link.
        latency: Seconds per message.
        gap: Minimum duration, in seconds, of a round in which every rank sends and receives one message of any size
            (g in LogP, Culler et al. 1993, doi:10.1145/155332.155333). It exceeds the latency if processors limit it.
        incast: Fraction of the bandwidth, 0 to 1, that remains during an all-to-all exchange (Phanishayee et al.,
            FAST 2008).
    """

    bandwidth: Annotated[float, Range(above=0, hint="the unit is bytes/s")]
    latency: Annotated[float, Range(least=0, hint="the unit is seconds")]
    gap: Annotated[float, Range(least=0, hint="the unit is seconds")] = 0.0
    incast: Annotated[float, SHARE] = 1.0


@dataclass(frozen=True)
class Spot:
    """Failure rate and price of spot nodes, which their provider may reclaim at any time.

    Attributes:
        mtbf_hours: Mean hours between failures of one node, including reclaims.
        price_per_hour: Price per node and hour, in the same currency as the cluster's; None if unknown.
    """

    mtbf_hours: Annotated[float, Range(above=0), Key(default=None)]
    price_per_hour: Annotated[float | None, Range(least=0)] = None


@dataclass(frozen=True)
class Cluster:
    """The machines available to a launcher.

    Attributes:
        name: Name of the configuration, such as "ssh".
        nodes: Number of hosts.
        processes: Total number of processes; every node runs the same number.
        device: Device type for training, as torch names it: "cpu", "cuda", "xpu".
        backend: torch.distributed backend, such as "gloo" or "nccl".
        threads: Threads per process; None: the node's cores divided by its processes.
        cpus_per_process: CPUs that each process needs for its threads and its data workers.
        timeout: Seconds that a process waits for its peers.
        interface: Network interface for collectives; None: the one with a route to the first node.
        hca: InfiniBand adapters that NCCL may use (NCCL_IB_HCA).
        links: Links by tier: "device", "node", the names in ``tiers``, "network".
        tiers: Tiers between a node and the network, innermost first: tier name to nodes per unit, such as
            {"rack": 16, "pod": 64}. The nodes of a unit are consecutive. In the configuration a value may also be a
            mapping with ``nodes`` and the keys of a link.
        device_memory: Bytes that one process may use, for planning; None: the memory of this machine.
        price_per_hour: Price per node and hour, in any currency, for planning.
        mtbf_hours: Mean hours between failures of one node, for planning and ``checkpoint.every=auto``; None if
            unknown.
        peak_flops: Dense operations per second of one process's device, for the MFU; None: look up the GPU model.
        debug: Whether NCCL and torch log their operations to the process logs.
        spot_market: Price and failure rate of these nodes on the spot market; None if unknown.
        min_processes: Smallest number of processes with which a healing run continues; None: 1.
        spares: Standby processes of a healing run; they replace failed processes.
        spare_nodes: Standby nodes of a healing run, listed last in ``hosts``. Their processes replace those of a failed
            node.
        pin: Whether to bind a process to the cores and memory of a NUMA node ("numa") or to its exclusive share of them
            ("exclusive"); "auto": "numa" on machines with several NUMA nodes.
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
    device_memory: Annotated[float | None, Range(above=0, hint="the unit is bytes")] = None
    price_per_hour: Annotated[float | None, Range(least=0)] = None
    mtbf_hours: Annotated[float | None, Range(above=0)] = None
    spot_market: Spot | None = None
    min_processes: Annotated[int | None, COUNT] = None
    spares: Annotated[int, Range(least=0, most=256)] = 0
    spare_nodes: Annotated[int, Range(least=0, most=256)] = 0
    peak_flops: Annotated[float | None, Range(above=0, hint="the unit is FLOP/s")] = None
    debug: bool = False
    pin: Annotated[Pinning, Key(default="auto")] = "none"

    @property
    def processes_per_node(self) -> int:
        """Number of processes on each node."""
        return self.processes // self.nodes

    @property
    def cpus_per_node(self) -> int:
        """Number of CPUs that a node's processes need."""
        return self.processes_per_node * self.cpus_per_process

    @property
    def all_nodes(self) -> int:
        """Number of nodes, including spare nodes."""
        return self.nodes + self.spare_nodes

    @property
    def waiting(self) -> int:
        """Number of standby processes at the start, on spare nodes and elsewhere."""
        return self.spare_nodes * self.processes_per_node + self.spares


@dataclass(frozen=True)
class Block:
    """Shape of a data-parallel replica: processes that together hold one complete model."""

    size: int = 1
    """Number of processes."""
    together: int = 1
    """Size of the groups within the block whose processes must share a host."""


@dataclass(frozen=True)
class Role:
    """A group of processes with one task, and what happens when one of them dies."""

    processes: int
    """Total number of processes on all nodes."""
    restart: Literal["gang", "individual", "heal"] = "gang"
    """What happens when a process dies: the whole gang restarts ("gang"), only that process restarts ("individual"), or
    the others continue and take over its share of each step ("heal")."""
    serves: bool = False
    """Whether its processes run :meth:`Strategy.serve`, without a process group, instead of training a replica."""
    min_processes: int | None = None
    """Number of live processes that the run needs to continue after failures; None: all."""
    blocks: tuple[Block, ...] = (Block(),)
    """Possible shapes of a data-parallel replica, the preferred one first. A healing role trains in whole blocks of the
    shape that leaves the fewest processes waiting."""


@dataclass(frozen=True)
class World:
    """This process's role, ranks, device and process groups in its run.

    Attributes:
        role: Name of the process's role, such as "worker".
        rank: Rank within the role, from 0. A recipe may use only ``rank`` and ``size``.
        size: Number of processes of the role.
        global_rank: Rank among all processes of the run, from 0.
        world_size: Number of processes of the run, over all roles.
        local_rank: Rank among the processes of this node, from 0.
        node_rank: Index of this node, from 0.
        device: This process's training device.
        groups: Process groups by name. "all": all training processes; "worker": the processes of the role "worker".
            This role also has "checkpoint/worker" and, on accelerators, "host/worker" for CPU tensors. If all processes
            train on several nodes, also "node": this node; "across": the processes with this local rank on all nodes;
            per tier ("tier/rack", ..., "tier/network"): the processes with this index in the units of the tier below.
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
    def create_single(device: torch.device) -> World:
        """Return the world of a single worker on ``device``, without process groups."""
        return World("worker", 0, 1, 0, 1, 0, 0, device)

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of this role; ``None`` if the run does not use process groups."""
        return self.groups.get(self.role)


_DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})\Z")
_FILES = (".sif", ".sqsh", ".squashfs")


@final
@dataclass(frozen=True)
class ContainerImage:
    """A container image, identified by its digest, since different images may share a name.

    Attributes:
        name: The name as given, such as "trainer:1" or "trainer@sha256:...", or the path of an image file.
        digest: "sha256:" and 64 hexadecimal digits, taken from the name or computed from the file. None if the name is
            only a tag, which may point to a different image later, or if this machine cannot access the file.
    """

    name: str
    digest: str | None

    @staticmethod
    def from_name(name: str) -> ContainerImage:
        """Return the image called ``name``; an image file is read in full to hash it."""
        if match := _DIGEST.search(name):
            return ContainerImage(name, match[1])
        file = Path(name)
        if is_image_file(name) and file.is_file():
            status = file.stat()
            return ContainerImage(name, f"sha256:{_hash_file(file, status.st_mtime_ns, status.st_size)}")
        return ContainerImage(name, None)


def is_image_file(name: str) -> bool:
    """Return whether an image's name is a file path, as used by Apptainer and enroot."""
    return "://" not in name and name.endswith(_FILES)


@cache
def _hash_file(file: Path, time_ns: int, size: int) -> str:
    """Hash ``file``; the modification time and size are part of the cache key."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
