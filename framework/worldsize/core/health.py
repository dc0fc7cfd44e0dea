"""What is watched of the nodes of a run, and from which figures on it is worth an alert."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HealthLimits:
    """The limits beyond which a figure of a node raises an alert, None for never, and how often they are checked.

    Attributes:
        every: Seconds between two samples of a node.
        memory: Share of the memory of the node, or of the container that the run is in, that is in use.
        process_memory: Resident bytes of one process of the run.
        swap: Bytes that the node reads from and writes to its swap space in a second.
        disk: Share of the file system of the run folder that is in use.
        temperature: Degrees Celsius of a GPU.
        network_errors: Errors of the network interfaces in a minute.
        cpus: CPUs that the run's processes on a node need; an alert is raised if they are bound to fewer.
    """

    every: float
    memory: float | None = None
    process_memory: float | None = None
    swap: float | None = None
    disk: float | None = None
    temperature: float | None = None
    network_errors: float | None = None
    cpus: int | None = None
