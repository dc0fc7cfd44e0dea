"""Launch on this machine alone: the launching process forks all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from worldsize.config.shape import check_gpus
from worldsize.core import Cluster, ConfigError, Job, Launcher, Plan
from worldsize.launch.node import NodeLauncher, Rendezvous
from worldsize.world.environments import Node
from worldsize.world.roles import role_of


@final
@dataclass(frozen=True)
class Local(NodeLauncher, Launcher):
    """Starts every process by ``fork``: K workers cost one import of torch, not K.

    The launching process must have no threads and no CUDA context at that time. Torch's elastic agent is
    not used: it polls every 0.1 s, waits 30 s for a gang that ignores SIGTERM, and reports whichever
    failed process it sees first, which often is not the one that failed first.
    """

    def check(self, cluster: Cluster) -> None:
        if cluster.nodes != 1:
            raise ConfigError(f"the local launcher starts processes on one node; cluster.nodes={cluster.nodes}.")
        if cluster.device == "cuda":
            import torch  # takes seconds

            check_gpus(cluster.processes_per_node, torch.cuda.device_count())

    def launch(self, plan: Plan) -> Job:
        return self.start_node(plan, Node(), Rendezvous.alone(plan))

    def describe(self, plan: Plan) -> str:
        lines = [
            f"{plan.world_size} processes on this machine, device {plan.cluster.device}, backend {plan.cluster.backend}"
        ]
        for rank in range(plan.world_size):
            role, role_rank = role_of(rank, plan.roles)
            lines.append(f"  [{role} {role_rank}] RANK={rank} python -m worldsize.worker {plan.run_dir}")
        return "\n".join(lines)
