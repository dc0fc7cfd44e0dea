"""The shape of a run: links, nodes, roles, and who a process is among the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # torch takes seconds, and commands that compute nothing name these contracts too
    import torch
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Link:
    """One tier of the interconnect. Links of the tiers "device" and "node" are a rank's, of "network" a node's.

    Attributes:
        bandwidth: Bytes a second in each direction; the ranks of a node share that of its network.
        latency: Seconds.
        gap: Least seconds of a round in which every rank sends to one and hears from one, however few the bytes (g of
            LogP, Culler et al. 1993, doi:10.1145/155332.155333): more than the latency where processors bound it.
        incast: Share of the bandwidth that is left where all ranks send to all at once (Phanishayee et al., FAST 2008).
    """

    bandwidth: float
    latency: float
    gap: float = 0.0
    incast: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """The machines that a launcher offers.

    Attributes:
        name: Name of the configuration, such as "ssh".
        nodes: Number of hosts.
        processes: Processes of all nodes, which have equally many.
        device: Device on which processes train.
        backend: Backend of torch.distributed, such as "gloo" or "nccl".
        threads: Threads of each process; None: its share of the node's cores.
        timeout: Seconds that a process waits for its peers.
        interface: Network interface of the collectives; None: the one that leads to the first node.
        hca: InfiniBand adapters that NCCL may use (NCCL_IB_HCA).
        links: Links by tier: "device", "node", "network".
        device_memory: Bytes that one process may fill, for planning; None: what this machine has.
        price_per_hour: Price of a node, for planning.
    """

    name: str
    nodes: int
    processes: int
    device: Literal["cpu", "cuda"]
    backend: str
    threads: int | None = None
    timeout: float = 600.0
    interface: str | None = None
    hca: str | None = None
    links: Mapping[str, Link] = field(default_factory=dict)
    device_memory: float | None = None
    price_per_hour: float | None = None

    @property
    def processes_per_node(self) -> int:
        """Number of processes on each node."""
        return self.processes // self.nodes


@dataclass(frozen=True)
class Role:
    """A group of processes with one task, and what happens when one of them dies."""

    processes: int
    """Number of processes, over all nodes."""
    restart: Literal["gang", "individual"] = "gang"
    """Whether a process that died starts again with its gang or by itself."""
    serves: bool = False
    """Its processes run :meth:`Strategy.serve` and have no process group; the others train a replica."""
    min_processes: int | None = None
    """Number that must live for the run to go on without those that died; None: all."""


@dataclass(frozen=True)
class World:
    """The place of this process among the others of its run.

    Attributes:
        role: Name of its role, such as "worker".
        rank: Rank within the role. A recipe may look at ``rank`` and ``size`` alone.
        size: Processes of the role.
        global_rank: Rank among all processes of the run.
        world_size: Processes of the run, of all roles.
        local_rank: Rank on its node.
        node_rank: Rank of its node.
        device: Device on which it trains.
        groups: Process groups by name: of all that train ("all"), of each role, of this node.
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
        """The processes of this role; ``None`` where there is no process group at all."""
        return self.groups.get(self.role)
