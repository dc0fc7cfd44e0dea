"""The servers of a recipe with several updates a step: each has a shard of the parameters of each optimizer.

A shard counts the updates of its optimizer; that of an ordinary recipe counts steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

from torch import nn
from torch.optim import Optimizer

from plugins.parameter_server.coordinator import AllShards
from plugins.parameter_server.protocol import Peers
from plugins.parameter_server.server import SERVER_PREFIX
from plugins.parameter_server.server_group import PendingServer, ServerGroup, full_state, load_full_state
from plugins.parameter_server.shard import PushReceiver, Rule, Shard
from plugins.parameter_server.shard_parameters import ShardParameters
from plugins.parameter_server.sharding import ShardingPlan
from plugins.parameter_server.task_pool import StalenessScheduler
from plugins.parameter_server.task_scheduler import TaskScheduler, TaskService
from plugins.parameter_server.update_coordinator import UpdateCoordinator, UpdateRounds
from worldsize.core import MultiUpdateRecipe, RunContext
from worldsize.net.registry import Dialer, EndedError
from worldsize.strategies.multi_train_state import MultiTrainState, optimizers_of


@final
@dataclass(frozen=True)
class PendingUpdateServer:
    """A server that is not yet master of its shards.

    Attributes:
        kind: Name of the recipe's class.
        servers: The server of each optimizer's shard, by the optimizer's name.
        train_state: The full model, which receives the state of all shards when it is saved.
        step: The step of the checkpoint from which the run resumes.
        dialer: Connects this process to the other servers.
        lease: Seconds without a heartbeat after which a worker is declared dead.
    """

    kind: str
    servers: Mapping[str, PendingServer]
    train_state: MultiTrainState
    step: int
    dialer: Dialer
    lease: float

    def run(self, context: RunContext, *, count: int) -> UpdateCoordinator | None:
        """Serve, as one of ``count`` servers, from when this one is master of its shards until the run ends.

        Returns:
            The replica with which the training loop drives the run, if this is the first server; otherwise None, when
            the run is over.
        """
        try:
            for pending in self.servers.values():
                pending.succession.run()
        except EndedError:
            return None
        if context.world.rank == 0:
            return self._lead(context, count=count)
        first, *others = self.servers.values()
        served = [first.serve(on_begin=context.faults.enter), *(server.serve() for server in others)]
        for server in served:
            server.master.log.ended.wait()
        return None

    def _lead(self, context: RunContext, *, count: int) -> UpdateCoordinator:
        staleness = StalenessScheduler(0, context.logical_ranks, self.lease, first=self.step)
        scheduler = TaskScheduler(staleness, timeout=self.dialer.timeout)
        rounds = UpdateRounds(self.kind, scheduler)
        tasks = TaskService(scheduler, rounds.next_task)
        own = [
            server.serve(services={} if place else {"control": tasks.control, "beat": tasks.beat})
            for place, server in enumerate(self.servers.values())
        ]
        scheduler.meet(context.workers, seconds=self.lease)
        peers = [Peers(self.dialer, range(first + 1, first + count)) for first in range(0, len(own) * count, count)]
        shards = dict(zip(self.servers, map(AllShards, own, peers), strict=True))
        return UpdateCoordinator(
            shards, rounds, self.dialer.registry, self.train_state, context, step_reached=self.step
        )


def pending_update_server(
    group: ServerGroup,
    recipe: MultiUpdateRecipe,
    train_state: MultiTrainState,
    context: RunContext,
    *,
    plans: Mapping[str, ShardingPlan],
) -> PendingUpdateServer:
    """Make this process's server, with the newest checkpoint's state.

    Args:
        group: The servers of the run.
        recipe: The recipe of the run.
        train_state: The first model that the recipe made in this process; only it has the run's initial weights.
        context: The context of the run, with its newest checkpoint.
        plans: The assignment of parameters to servers, by the optimizer's name.
    """
    index, dialer = context.world.rank, group.dialer(f"{SERVER_PREFIX}{context.world.rank}", context)
    full = MultiTrainState.of(recipe, recipe.model())
    full.model.load_state_dict(train_state.model.state_dict())
    rows = next(iter(plans.values())).rows
    state, step = context.checkpoints.restore(lambda: full_state(full, {}, rows)) or (None, 0)
    if state is not None:
        load_full_state(train_state, state)
        load_full_state(full, state)
    rule = Rule(
        context.logical_ranks,
        requires_commit=True,  # an update is weighed and clipped over all servers, and can be abandoned
        finite=context.numerics.nonfinite == "stop",
    )
    servers = {}
    for place, (name, plan) in enumerate(plans.items()):
        make = partial(_optimizer_of, recipe, name)
        shard = Shard(ShardParameters(train_state.parts[name], plan.shards[index], make=make), rule)
        receiver, number = PushReceiver(shard, plan.codec), place * group.servers + index
        servers[name] = group.pending(receiver, full.parts[name], context, dialer, number=number)
    return PendingUpdateServer(type(recipe).__name__, servers, full, step, dialer, group.lease)


def _optimizer_of(recipe: MultiUpdateRecipe, name: str, model: nn.Module) -> Optimizer:
    return optimizers_of(recipe, model)[name]
