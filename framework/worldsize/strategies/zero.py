"""ZeRO stage 1: every rank holds the model, and the optimizer state of some parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, final

from torch import nn
from torch.optim import Optimizer

from worldsize.core import (
    Cluster,
    Cost,
    MultiUpdateRecipe,
    Recipe,
    Replica,
    Role,
    RunContext,
    Strategy,
    Workload,
    World,
)
from worldsize.core.limits import MEBIBYTES
from worldsize.dist.cost.cluster import across, all_gather_all_seconds, all_reduce_seconds, ring_share
from worldsize.dist.cost.collectives import bucketed_exposed_seconds
from worldsize.strategies.alone import alone
from worldsize.strategies.ddp import OnFailure, replicated, worker_roles
from worldsize.strategies.multi_train_state import MultiTrainState, optimizers_of
from worldsize.strategies.multi_update import refuse_healing_updates, whole_multi_update
from worldsize.strategies.optimizer_checks import refuse_divided_state, refuse_joint_updates, refuse_unsent
from worldsize.strategies.owned_steps import OwnedSteps
from worldsize.strategies.reducers import gradient_reducer, interruptible_reducer
from worldsize.strategies.schedules import Schedule
from worldsize.strategies.sharded_state import ShardedOptimizerState, meta_state, multi_meta_states
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.strategies.train_state import TrainState, optimizer_of


@final
@dataclass(frozen=True)
class ZeRO(Strategy):
    """Sharded optimizer state (Rajbhandari et al. 2020, arXiv 1910.02054, stage 1).

    Gradients are all-reduced as in DDP. On each rank the recipe's optimizer updates its own parameters and sends
    them to the others. Options: see :class:`~worldsize.strategies.ddp.DDP`.
    """

    averages_weights = True
    trains_multi_update = True
    gathers_features = True
    compiles = True
    recomputes = True
    sums_sparse_gradients = True
    special_optimizers = ("adamw_8bit",)
    shards_state = True

    bucket_mb: Annotated[float, MEBIBYTES] = 25.0
    find_unused_parameters: bool = False
    on_failure: OnFailure = "restart"

    def check_recipe(self, recipe: Recipe) -> None:
        if self.on_failure == "heal":
            refuse_healing_updates(recipe)

    def check_built(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        refuse_joint_updates(recipe, model, optimizer, because="with this strategy each rank updates some of them")
        refuse_divided_state(recipe, model, optimizer)
        if self.on_failure == "heal":
            refuse_unsent(recipe, model, optimizer)

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        return worker_roles(cluster, self.on_failure)

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        return _cost(work, cluster, bucket_mb=self.bucket_mb)

    @property
    def schedules_by_metric(self) -> bool:
        return True

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        world = context.world
        model = recipe.model().to(world.device)
        if world.size == 1:
            return alone(recipe, model, context, self.reduce)
        if isinstance(recipe, MultiUpdateRecipe):
            return whole_multi_update(
                recipe, context, _multi_sharded(recipe, model, world), self.reduce, self.bucket_mb
            )
        train_state = _sharded(recipe, model, world)
        options = {"bucket_cap_mb": self.bucket_mb, "find_unused_parameters": self.find_unused_parameters}
        heals = self.on_failure == "heal"
        module = replicated(model, world, interruptible=heals, **options)
        logical_ranks = context.logical_ranks if heals else None  # else all have equally many
        if heals:
            sums = interruptible_reducer(self.reduce, module, world, logical_ranks)
        else:
            sums = gradient_reducer(self.reduce, module, world.group)
        return SynchronousReplica(
            recipe, context, train_state=train_state, reducer=sums, module=module, logical_ranks=logical_ranks
        )


def _sharded(recipe: Recipe, model: nn.Module, world: World) -> TrainState:
    full = meta_state(recipe, model)["optimizer"]  # first, since a recipe may keep the optimizer that it made last
    optimizer = optimizer_of(recipe, model)
    parts = _owned_state(model, optimizer, world, full)
    return TrainState(model, optimizer, Schedule.of(recipe.schedule(optimizer)), parts)


def _multi_sharded(recipe: MultiUpdateRecipe, model: nn.Module, world: World) -> MultiTrainState:
    full = multi_meta_states(recipe, model)  # first, since a recipe may keep the optimizers that it made last
    optimizers = optimizers_of(recipe, model)
    parts = {name: _owned_state(model, each, world, full[name]) for name, each in optimizers.items()}
    return MultiTrainState.scheduled(recipe, model, optimizers, parts)


def _owned_state(
    model: nn.Module, optimizer: Optimizer, world: World, full: Mapping[str, Any]
) -> ShardedOptimizerState:
    """Restrict the steps of ``optimizer`` to this rank's parameters, and return its state."""
    steps = OwnedSteps(optimizer, world)
    steps.begin()
    return ShardedOptimizerState(model, optimizer, full, steps.restricted)


def _cost(work: Workload, cluster: Cluster, *, bucket_mb: float) -> Cost:
    """Return the cost of DDP, plus sending each rank's updated parameters to all others."""
    payload, ranks = work.parameter_bytes, cluster.processes
    sent = 3 * ring_share(ranks) * payload
    gathered = all_gather_all_seconds(payload, cluster)
    seconds = partial(all_reduce_seconds, cluster=cluster)
    exposed = bucketed_exposed_seconds(payload, bucket_mb * 2**20, work.overlap * work.compute_seconds, seconds)
    return Cost(
        memory_bytes=2 * payload + work.optimizer_bytes / ranks + work.activation_bytes,
        sent_bytes=sent,
        across_bytes=across(cluster, sent),
        communication_seconds=seconds(payload) + gathered,
        exposed_seconds=exposed + gathered if work.overlap else None,
        added_seconds=-ring_share(ranks) * work.update_seconds,
    )
