"""torchrun, started by hand on every node: this launcher says how."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from worldsize.core import Cluster, ConfigError, Job, Launcher, Outcome, Plan
from worldsize.world.environments import port_of


@final
@dataclass(frozen=True)
class Torchrun(Launcher):
    """Prints the command for each node. ``first``: address of the first; ``port``: at which they meet."""

    first: str = "FIRST_HOST"
    port: int | None = None
    max_restarts: int = 0
    submits = True

    def check(self, cluster: Cluster) -> None:
        if cluster.nodes < 1:
            raise ConfigError(f"cluster.nodes={cluster.nodes} must be 1 or more.")

    def launch(self, plan: Plan) -> Job:
        if any(role.serves for role in plan.roles.values()):
            raise ConfigError(
                "torchrun starts all processes alike, and this strategy has servers. Start `worldsize agent RUN` on "
                "each host instead, or use cluster=ssh or slurm."
            )
        print(self.describe(plan))
        return _ByHand()

    def describe(self, plan: Plan) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in plan.environment.items()]
        worker = ["-m", "worldsize.worker", str(plan.run_dir)]
        lines = []
        for node in range(plan.cluster.nodes):
            words = ["torchrun", *self._meeting(plan, node), f"--max-restarts={self.max_restarts}", *worker]
            lines.append(f"# on node {node}\n{' '.join(variables)}{' ' if variables else ''}{shlex.join(words)}")
        return "\n".join(lines)

    def _meeting(self, plan: Plan, node: int) -> list[str]:
        size = f"--nproc-per-node={plan.cluster.processes_per_node}"
        if plan.cluster.nodes == 1:
            return ["--standalone", size]
        end = f"{self.first}:{self.port or port_of(plan.run_dir.name)}"
        named = [f"--rdzv-endpoint={end}", f"--rdzv-id={plan.run_dir.name}", f"--node-rank={node}"]
        return [f"--nnodes={plan.cluster.nodes}", size, "--rdzv-backend=c10d", *named]


@final
class _ByHand(Job):
    ids: Sequence[str] = ()

    def wait(self) -> Outcome:
        return Outcome("submitted", 0)

    def cancel(self) -> None:
        """Whoever started it ends it."""
