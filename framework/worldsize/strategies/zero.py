"""ZeRO stage 1: every rank holds the whole model, but only a shard of the optimizer state.

Each rank updates its own parameters and receives the others, so updates must not depend on other parameters.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.collectives.cluster_cost import (
    all_gather_all_seconds,
    all_reduce_seconds,
    estimate_leaving_bytes,
    ring_share,
)
from worldsize.collectives.cost import estimate_bucketed_exposure
from worldsize.collectives.group import start_collective
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import (
    Cluster,
    Cost,
    Recipe,
    Replica,
    Role,
    RunContext,
    StateDict,
    Strategy,
    Workload,
    World,
)
from worldsize.core.limits import MEBIBYTES
from worldsize.optimizers.groups import all_parameters, create_optimizers
from worldsize.strategies.ddp import OnFailure, worker_roles
from worldsize.strategies.model_replica import CAPABILITIES
from worldsize.strategies.multi_update import refuse_healing_updates, whole_multi_update
from worldsize.strategies.optimizer_checks import refuse_divided_state, refuse_joint_updates, refuse_unsent
from worldsize.strategies.reducers import gradient_reducer, interruptible_reducer
from worldsize.strategies.sharded_state import ShardedOptimizerState, meta_states
from worldsize.strategies.step_hooks import enclose_steps
from worldsize.strategies.synchronous import SynchronousReplica, create_local_replica, wrap_in_ddp
from worldsize.strategies.train_state import TrainState


@final
@dataclass(frozen=True)
class ZeRO(Strategy):
    """Sharded optimizer state (Rajbhandari et al. 2020, arXiv 1910.02054, stage 1).

    Gradients are all-reduced as in DDP. On each rank, the recipe's optimizer updates only the rank's own parameters,
    which are then broadcast to the other ranks. For the options, see :class:`~worldsize.strategies.ddp.DDP`.
    """

    supports = CAPABILITIES | {"integrity", "sparse_gradients", "adamw_8bit"}
    shards_state = True

    bucket_mb: Annotated[float, MEBIBYTES] = 25.0
    find_unused_parameters: bool = False
    on_failure: OnFailure = "restart"

    def check_recipe(self, recipe: Recipe) -> None:
        if self.on_failure == "heal":
            refuse_healing_updates(recipe)

    def check_built(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        refuse_joint_updates(
            recipe, model, optimizer, because="each rank updates only its own parameters with this strategy"
        )
        refuse_divided_state(recipe, model, optimizer)
        if self.on_failure == "heal":
            refuse_unsent(recipe, model, optimizer)

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        return worker_roles(cluster, self.on_failure)

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        return _estimate_cost(work, cluster, bucket_mb=self.bucket_mb)

    @property
    def schedules_by_metric(self) -> bool:
        return True

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        world = context.world
        model = recipe.model().to(world.device)
        if world.size == 1:
            return create_local_replica(recipe, model, context, self.reduce)
        train_state = _create_sharded_state(recipe, model, world)
        if recipe.has_several_updates:
            return whole_multi_update(recipe, context, train_state, self.reduce, self.bucket_mb)
        options = {"bucket_cap_mb": self.bucket_mb, "find_unused_parameters": self.find_unused_parameters}
        heals = self.on_failure == "heal"
        module = wrap_in_ddp(model, world, interruptible=heals, **options)
        logical_ranks = context.logical_ranks if heals else None  # None: the same number on each process
        if heals:
            sums = interruptible_reducer(self.reduce, module, world, logical_ranks)
        else:
            sums = gradient_reducer(self.reduce, module, world.group)
        return SynchronousReplica(
            recipe, context, train_state=train_state, reducer=sums, module=module, logical_ranks=logical_ranks
        )


def _create_sharded_state(recipe: Recipe, model: nn.Module, world: World) -> TrainState:
    full = meta_states(recipe, model)  # before the real optimizers, since a recipe may keep the ones it made last
    optimizers = create_optimizers(recipe, model)
    parts = {name: _create_owned_state(model, each, world, full[name]) for name, each in optimizers.items()}
    return TrainState.from_recipe(recipe, model, optimizers, parts)


def _create_owned_state(model: nn.Module, optimizer: Optimizer, world: World, full: StateDict) -> ShardedOptimizerState:
    """Restrict the steps of ``optimizer`` to this rank's parameters, and return its state."""
    steps = OwnedSteps(optimizer, world)
    steps.restrict_steps()
    return ShardedOptimizerState(model, optimizer, full, steps.restrict_groups)


def _estimate_cost(work: Workload, cluster: Cluster, *, bucket_mb: float) -> Cost:
    """Return the cost of a DDP step plus broadcasting the updated parameters."""
    payload, ranks = work.parameter_bytes, cluster.processes
    sent = 3 * ring_share(ranks) * payload
    gathered = all_gather_all_seconds(payload, cluster)
    seconds = partial(all_reduce_seconds, cluster=cluster)
    exposed = estimate_bucketed_exposure(payload, bucket_mb * 2**20, work.overlap * work.compute_seconds, seconds)
    return Cost(
        memory_bytes=2 * payload + work.optimizer_bytes / ranks + work.activation_bytes,
        sent_bytes=sent,
        across_bytes=estimate_leaving_bytes(cluster, sent),
        communication_seconds=seconds(payload) + gathered,
        exposed_seconds=exposed + gathered if work.overlap else None,
        added_seconds=-ring_share(ranks) * work.update_seconds,
    )


_SMALL = 1 << 20  # bytes: parameters up to this size are copied into one message


@final
class OwnedSteps:
    """Restricts the steps of ``optimizer`` to this rank's parameters, then broadcasts them.

    The recipe's optimizer itself is used. During a step, its groups contain only this rank's parameters, and other
    parameters have no gradient, so that it creates no state for them. Before and after a step its groups are complete:
    schedules and the recipe's hooks see all parameters, equal on all ranks.
    """

    def __init__(self, optimizer: Optimizer, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        self._owners = assign_owners([group["params"] for group in optimizer.param_groups], world.size)
        self._whole: list[list[Tensor]] | None = None  # the complete groups, while they are restricted
        self._gradients: list[tuple[Tensor, Tensor]] = []  # gradients of other ranks' parameters, during a step
        self._alone = False  # whether steps skip the broadcast

    def restrict_steps(self) -> None:
        """Restrict every step from now on."""
        enclose_steps(self._optimizer, self._restrict_step, self._complete_step)

    @contextmanager
    def restrict_groups(self) -> Iterator[None]:
        """Restrict the groups to this rank's parameters, and skip broadcasts, within the context."""
        self._restrict()
        self._alone = True
        try:
            yield
        finally:
            self._alone = False
            self._complete()

    def _restrict_step(self) -> None:
        if self._alone:
            return
        others = [each for each in all_parameters(self._optimizer) if not self._is_owner(each)]
        self._gradients = [(each, each.grad) for each in others if each.grad is not None]
        for each, _ in self._gradients:
            each.grad = None
        self._restrict()

    def _complete_step(self) -> None:
        if self._alone:
            return
        self._complete()
        for each, gradient in self._gradients:
            each.grad = gradient
        self._gradients = []
        with measure_phase("communication"):
            self._exchange()

    def _exchange(self) -> None:
        """Broadcast updated parameters from their owners; small ones share a message per owner."""
        messages: dict[tuple[int, object], list[Tensor]] = {}
        for place, each in enumerate(all_parameters(self._optimizer)):
            owner = self._owners.get(id(each))
            if each.requires_grad and owner is not None:
                kind = (each.dtype, each.device) if each.nbytes <= _SMALL else place
                messages.setdefault((owner, kind), []).append(each.detach())
        flights = []
        for (owner, _), parts in messages.items():
            sent = parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
            work = start_collective(dist.broadcast, sent, group=self._world.group, group_src=owner)
            flights.append((work, sent, parts))
        for work, sent, parts in flights:
            work.wait()
            if len(parts) > 1:
                received = torch.split(sent, [part.numel() for part in parts])
                torch._foreach_copy_(parts, [own.view(part.shape) for own, part in zip(received, parts, strict=True)])

    def _is_owner(self, parameter: Tensor) -> bool:
        """Return whether this rank updates ``parameter``; all ranks update parameters added later."""
        return self._owners.get(id(parameter), self._world.rank) == self._world.rank

    def _restrict(self) -> None:
        groups = self._optimizer.param_groups
        self._whole = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [each for each in group["params"] if self._is_owner(each)]

    def _complete(self) -> None:
        assert self._whole is not None
        for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=True):
            group["params"] = parameters
        self._whole = None


def assign_owners(groups: Iterable[Iterable[Tensor]], ranks: int) -> dict[int, int]:
    """Assign each parameter (by id) to the least loaded rank; within a group, largest first."""
    loads, owned = [(0, rank) for rank in range(ranks)], dict[int, int]()
    for group in groups:
        for parameter in sorted(group, key=Tensor.numel, reverse=True):
            load, rank = heapq.heappop(loads)
            owned[id(parameter)] = rank
            heapq.heappush(loads, (load + parameter.numel(), rank))
    return owned
