"""Servers for several updates per step; each has a shard of every optimizer's parameters.

A shard's ``step`` counts the updates of its optimizer here, but training steps with other recipes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

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
from worldsize.core import Recipe, RunContext
from worldsize.net.registry import Dialer, EndedError
from worldsize.optimizers.groups import create_optimizer
from worldsize.strategies.train_state import TrainState


@final
@dataclass(frozen=True)
class PendingUpdateServer:
    """A server that is not yet master of its shards.

    Attributes:
        kind: Name of the recipe's class.
        servers: The pending server for each optimizer's shard, by optimizer name.
        train_state: The full model, filled with the state of all shards for saving.
        step: The step of the checkpoint to resume from.
        dialer: Connects this process to the other servers.
        lease: Seconds without a heartbeat before a worker is declared dead.
    """

    kind: str
    servers: Mapping[str, PendingServer]
    train_state: TrainState
    step: int
    dialer: Dialer
    lease: float

    def run(self, context: RunContext, *, count: int) -> UpdateCoordinator | None:
        """Wait to become master, then serve, as one of ``count`` servers, until the run ends.

        Returns:
            On the first server, the replica for the training loop. Otherwise None, after the run ends.
        """
        try:
            for pending in self.servers.values():
                pending.succession.run()
        except EndedError:
            return None
        if context.world.rank == 0:
            return self._lead_run(context, count=count)
        first, *others = self.servers.values()
        served = [first.serve(on_begin=context.faults.report_step), *(server.serve() for server in others)]
        for server in served:
            server.master.log.ended.wait()
        return None

    def _lead_run(self, context: RunContext, *, count: int) -> UpdateCoordinator:
        staleness = StalenessScheduler(0, context.logical_ranks, self.lease, first=self.step)
        scheduler = TaskScheduler(staleness, timeout=self.dialer.timeout)
        rounds = UpdateRounds(self.kind, scheduler)
        tasks = TaskService(scheduler, rounds.next_task)
        own = [
            server.serve(services={} if place else {"control": tasks.serve_control, "beat": tasks.receive_heartbeats})
            for place, server in enumerate(self.servers.values())
        ]
        scheduler.wait_for_workers(context.workers, seconds=self.lease)
        peers = [Peers(self.dialer, range(first + 1, first + count)) for first in range(0, len(own) * count, count)]
        shards = dict(zip(self.servers, map(AllShards, own, peers), strict=True))
        return UpdateCoordinator(
            shards, rounds, self.dialer.registry, self.train_state, context, step_reached=self.step
        )


def pending_update_server(
    group: ServerGroup,
    recipe: Recipe,
    train_state: TrainState,
    context: RunContext,
    *,
    plans: Mapping[str, ShardingPlan],
) -> PendingUpdateServer:
    """Create this process's server with the state of the newest checkpoint.

    Args:
        group: The servers of the run.
        recipe: The recipe of the run.
        train_state: The first model that the recipe created in this process; only it has the run's initial weights.
        context: The context of the run, with its newest checkpoint.
        plans: The assignment of parameters to servers, by optimizer name.
    """
    index, dialer = context.world.rank, group.create_dialer(f"{SERVER_PREFIX}{context.world.rank}", context)
    full = TrainState.from_recipe(recipe, recipe.model())
    full.model.load_state_dict(train_state.model.state_dict())
    rows = next(iter(plans.values())).rows
    state, step = context.checkpoints.restore(lambda: full_state(full, {}, rows)) or (None, 0)
    if state is not None:
        load_full_state(train_state, state)
        load_full_state(full, state)
    rule = Rule(
        context.logical_ranks,
        requires_commit=True,  # an update is weighed and clipped over all servers, and may be abandoned
        finite=context.numerics.nonfinite == "stop",
    )
    servers = {}
    for place, (name, plan) in enumerate(plans.items()):
        make = partial(create_optimizer, recipe, name=name)
        shard = Shard(ShardParameters(train_state.parts[name], plan.shards[index], make=make), rule)
        receiver, number = PushReceiver(shard, plan.codec), place * group.servers + index
        servers[name] = group.create_pending_server(receiver, full, context, dialer, number=number)
    return PendingUpdateServer(type(recipe).__name__, servers, full, step, dialer, group.lease)
