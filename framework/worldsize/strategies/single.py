"""Training in one process without a process group: the reference for all other strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from worldsize.collectives.cluster_cost import whole_bytes
from worldsize.core import Cluster, ConfigError, Cost, Recipe, Replica, Role, RunContext, Strategy, Workload
from worldsize.strategies.model_replica import CAPABILITIES
from worldsize.strategies.synchronous import create_local_replica


@final
@dataclass(frozen=True)
class Single(Strategy):
    """Train in one process; ``reduce="ordered"`` sums micro-batches in the logical-rank tree."""

    supports = CAPABILITIES | {"integrity", "adamw_8bit", "schedule_free", "operations"}

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        if cluster.processes != 1:
            raise ConfigError(
                f"strategy=single requires cluster.processes=1, got {cluster.processes}. Set cluster.processes=1, or "
                "strategy=ddp."
            )
        return {"worker": Role(processes=1)}

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        return Cost(whole_bytes(work), 0.0, 0.0, 0.0)

    @property
    def schedules_by_metric(self) -> bool:
        return True

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        model = recipe.model().to(context.world.device)
        return create_local_replica(recipe, model, context, self.reduce)
