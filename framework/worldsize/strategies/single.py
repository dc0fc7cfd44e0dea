"""One process, no process group: the reference that every other strategy is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from worldsize.collectives.cluster_cost import whole_bytes
from worldsize.core import Cluster, ConfigError, Cost, Recipe, Replica, Role, RunContext, Strategy, Workload
from worldsize.strategies.model_replica import CAPABILITIES
from worldsize.strategies.synchronous import alone


@final
@dataclass(frozen=True)
class Single(Strategy):
    """Trains in one process. With ``reduce="ordered"``, micro-batches are summed in the tree of logical ranks."""

    supports = CAPABILITIES | {"adamw_8bit", "schedule_free"}

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        if cluster.processes != 1:
            raise ConfigError(
                f"strategy=single runs on one process; the cluster has {cluster.processes}. "
                "Set cluster.processes=1, or strategy=ddp."
            )
        return {"worker": Role(processes=1)}

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        return Cost(whole_bytes(work), 0.0, 0.0, 0.0)

    @property
    def schedules_by_metric(self) -> bool:
        return True

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        model = recipe.model().to(context.world.device)
        return alone(recipe, model, context, self.reduce)
