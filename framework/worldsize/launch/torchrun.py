"""Prints the torchrun commands for the user to run on each node."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated, final

from worldsize.core import BatchLauncher, ConfigError, Plan, Range
from worldsize.core.launcher import cluster_option
from worldsize.core.limits import PORT
from worldsize.net.credentials import write_key
from worldsize.world.environments import derive_port


@final
@dataclass(frozen=True)
class Torchrun(BatchLauncher):
    """Prints one command per node, which starts torchrun or an agent.

    It starts an agent if the run has servers or ``agents`` is set.
    """

    gpus_per_node: Annotated[int | None, Range(least=0)] = cluster_option(None)  # one process per GPU
    first: str = cluster_option("FIRST_HOST")  # address of the first node
    port: Annotated[int | None, PORT] = cluster_option(None)  # rendezvous port; None: derived from the run's ID
    max_restarts: Annotated[int, Range(least=0)] = 0  # passed to torchrun
    agents: bool = False  # start worldsize's agents instead of torchrun

    def write(self, plan: Plan) -> None:
        write_key(plan.run_dir)

    def submit(self, plan: Plan) -> None:
        """Write the run's key without starting processes; the user runs the printed commands."""
        self.write(plan)

    def state(self, job: str) -> str | None:
        return None

    def cancel(self, job: str) -> None:
        raise ConfigError(
            "torchrun was started manually and has no job to cancel. Stop it on the hosts where you started it."
        )

    def writes_logs(self, plan: Plan) -> bool:
        return self._starts_agents(plan)

    def describe(self, plan: Plan) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in plan.environment.items()]
        commands = [" ".join([*variables, *self._build_command(plan, node)]) for node in range(plan.cluster.nodes)]
        return "\n".join(f"# on node {node}\n{command}" for node, command in enumerate(commands))

    def _build_command(self, plan: Plan, node: int) -> list[str]:
        if self._starts_agents(plan):
            place = [
                f"WORLDSIZE_NODES={plan.cluster.nodes}",
                f"WORLDSIZE_NODE_RANK={node}",
                f"WORLDSIZE_FIRST={self.first}",
            ]
            return [*place, "worldsize", "agent", shlex.quote(str(plan.run_dir))]
        worker = ["-m", "worldsize.worker", str(plan.run_dir)]
        words = ["torchrun", *self._rendezvous(plan, node), f"--max-restarts={self.max_restarts}", *worker]
        return [shlex.quote(word) for word in words]

    def _starts_agents(self, plan: Plan) -> bool:
        """Return whether the commands start agents; torchrun cannot start servers."""
        return self.agents or any(role.serves for role in plan.roles.values())

    def _rendezvous(self, plan: Plan, node: int) -> list[str]:
        size = f"--nproc-per-node={plan.cluster.processes_per_node}"
        if plan.cluster.nodes == 1:
            return ["--standalone", size]
        end = f"{self.first}:{self.port or derive_port(plan.run_dir.name)}"
        named = [f"--rdzv-endpoint={end}", f"--rdzv-id={plan.run_dir.name}", f"--node-rank={node}"]
        return [f"--nnodes={plan.cluster.nodes}", size, "--rdzv-backend=c10d", *named]
