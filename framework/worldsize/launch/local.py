"""Launches runs on this machine, by forking all processes from the launching process."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import final

from worldsize.config.shape import check_gpus
from worldsize.core import Cluster, ConfigError, Job, Launcher, Plan
from worldsize.devices import backend_names, device_count
from worldsize.errors import neighbours
from worldsize.launch.node import NodeLauncher, NodeRendezvous
from worldsize.world.environments import Node
from worldsize.world.pinning import Pins, pins_here
from worldsize.world.roles import find_role
from worldsize.world.topology import missing_interfaces


@final
@dataclass(frozen=True)
class Local(NodeLauncher, Launcher):
    """Starts all processes with ``fork``, so that torch is imported only once.

    The launching process must not have threads or a CUDA context when it forks. Torch's elastic agent is not used: it
    polls every 0.1 s, waits 30 s for a gang that ignores SIGTERM, and reports the first failure that it notices, which
    is often not the root cause.
    """

    def check(self, cluster: Cluster) -> None:
        if cluster.nodes != 1:
            raise ConfigError(
                f"the local launcher requires cluster.nodes=1, got {cluster.nodes}. Set cluster.nodes=1, or choose a "
                "different cluster."
            )
        if cluster.device != "cpu":
            check_gpus(cluster.processes_per_node, device_count(cluster.device), cluster.device)
        _check_network(cluster)
        pins_here(cluster, os.environ)

    def launch(self, plan: Plan) -> Job:
        return self.start_node(plan, Node(), NodeRendezvous.from_plan(plan))

    def describe(self, plan: Plan) -> str:
        lines = [
            f"{plan.world_size} processes on this machine, device {plan.cluster.device}, backend {plan.cluster.backend}"
        ]
        pins = _compute_pins(plan.cluster)
        for rank in range(plan.world_size):
            role, role_rank = find_role(rank, plan.roles)
            lines.append(f"  [{role} {role_rank}] RANK={rank} python -m worldsize.worker {plan.run_dir}")
            if pin := pins.get_pin(rank):
                lines.append(f"    on {pin}")
        if not pins.processes:
            lines.append(f"  not pinned: {pins.reason}")
        return "\n".join(lines)


def _compute_pins(cluster: Cluster) -> Pins:
    try:
        return pins_here(cluster, os.environ)
    except ConfigError as error:  # show the reason for refusing the run
        return Pins(reason=str(error))


def _check_network(cluster: Cluster) -> None:
    """Raise ConfigError if torch lacks the backend or this host lacks the interface."""
    import torch.distributed as dist  # takes seconds to import

    if missing := [name for name in backend_names(cluster.backend) if not dist.is_backend_available(name)]:
        raise ConfigError(
            f"cluster.backend={cluster.backend} is not supported: this build of torch lacks {missing[0]}. Set "
            "cluster.backend=gloo."
        )
    if cluster.interface is not None and (missing := missing_interfaces(cluster.interface, cluster.backend)):
        there = [name for _, name in socket.if_nameindex()]
        raise ConfigError(f"cluster.interface: unknown interface {missing[0]!r}{neighbours(missing[0], there)}")
