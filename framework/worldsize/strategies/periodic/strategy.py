"""Base class of strategies with workers that train independently and synchronize periodically."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from worldsize.core import Cluster, ConfigError, Range, Recipe, Replica, Role, RunContext, Strategy, World
from worldsize.dist.broadcast import make_equal
from worldsize.strategies.alone import alone
from worldsize.strategies.declared_buffers import declare_buffers
from worldsize.strategies.periodic.replica import OuterOptimizer, PeriodicSyncReplica
from worldsize.strategies.train_state import OptimizedModel
from worldsize.strategies.wrapping import refuse_complex

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


@dataclass(frozen=True)
class PeriodicSyncStrategy(Strategy):
    """Abstract: each worker takes ``inner_steps`` optimizer steps on its part of the batches between exchanges."""

    trains_multi_update = True
    compiles = True
    recomputes = True

    inner_steps: Annotated[int, Range(least=1)] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduce == "ordered":
            raise ConfigError(
                "reduce=ordered promises the same bits at any world size, but where workers train apart the result "
                "depends on how many they are. Set reproducibility=deterministic: the same bits at the same world size."
            )
        if self.reduce != "flat":
            raise ConfigError(
                f"reduce={self.reduce} is a way to sum gradients, and workers that train apart send none. "
                "Set strategy.reduce=flat."
            )

    def check_built(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        declare_buffers(recipe, model, trains_apart=True)
        refuse_complex(model, because="this strategy exchanges real numbers")

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        return {"worker": Role(processes=cluster.processes)}

    def update_parts(self, cluster: Cluster, logical_ranks: int) -> int:
        return self.data_parallel(cluster)

    @property
    def schedules_by_metric(self) -> bool:
        return True

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        world = context.world
        model = recipe.model().to(world.device)
        # an outer gradient is meaningless if workers start at different points
        make_equal(model, world.group)
        inner = alone(recipe, model, context)
        return PeriodicSyncReplica(inner, world, self.outer(recipe, inner.train_state, world))

    @abstractmethod
    def outer(self, recipe: Recipe, train_state: OptimizedModel, world: World) -> OuterOptimizer:
        """Make the outer optimizer that synchronizes this worker, which trains ``train_state``, with the others."""
