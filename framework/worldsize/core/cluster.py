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
    """One tier of the interconnect: bandwidth in bytes a second per direction, latency in seconds. ``gap``: seconds of
    a round in which every rank sends to one and hears from one, at the least, however few the bytes (g of LogP, Culler
    et al. 1993, doi:10.1145/155332.155333): more than the latency where processors are what bounds it. ``incast``:
    share of the bandwidth that is left where all ranks send to all at once (Phanishayee et al., FAST 2008).

    Of tiers "device" and "node" a rank's, of "network" a node's: its ranks share it.
    """

    bandwidth: float
    latency: float
    gap: float = 0.0
    incast: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """What a launcher offers: shape, device and links by tier ("device", "node", "network").

    For planning: ``device_memory`` in bytes that one process may fill, ``price_per_hour`` of a node.
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
        """Processes on each node; nodes are alike."""
        return self.processes // self.nodes


@dataclass(frozen=True)
class Role:
    """How many processes play a role, and what happens when one of them dies."""

    processes: int
    restart: Literal["gang", "individual"] = "gang"
    """Whether a process that died starts again with its gang or by itself."""
    serves: bool = False
    """Its processes run :meth:`Strategy.serve` and have no process group; the others train a replica."""
    min_processes: int | None = None
    """How many must live for the run to go on without those that died; None: all."""


@dataclass(frozen=True)
class World:
    """The place of this process among the others of its run.

    ``rank`` and ``size`` count within the role, and are all that a recipe may look at;
    ``global_rank`` and ``world_size`` count every process of the run.
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
        """One worker on ``device``, with no process group."""
        return World("worker", 0, 1, 0, 1, 0, 0, device)

    @property
    def group(self) -> ProcessGroup | None:
        """The processes of this role; ``None`` where there is no process group at all."""
        return self.groups.get(self.role)
