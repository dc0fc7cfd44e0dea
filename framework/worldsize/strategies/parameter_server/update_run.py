"""The part of each process in a run whose recipe has several updates a step."""

from __future__ import annotations

from worldsize.core import MultiUpdateRecipe, RunContext
from worldsize.strategies.multi_train_state import MultiTrainState
from worldsize.strategies.parameter_server.server_group import ServerGroup
from worldsize.strategies.parameter_server.shard_planner import ShardPlanner
from worldsize.strategies.parameter_server.update_coordinator import UpdateCoordinator
from worldsize.strategies.parameter_server.update_servers import pending_update_server
from worldsize.strategies.parameter_server.update_worker import UpdateWorker


def run_updates(
    recipe: MultiUpdateRecipe, context: RunContext, group: ServerGroup, planner: ShardPlanner
) -> UpdateCoordinator | None:
    """Serve or work, according to the role of this process.

    Returns:
        The replica with which the training loop drives the run, if this is the first server; otherwise None, when the
        run is over.
    """
    model, serves = recipe.model(), context.world.role == "server"
    train_state = MultiTrainState.of(recipe, model if serves else model.to(context.world.device))
    plans = planner.update_plans(recipe, train_state)
    if serves:
        pending = pending_update_server(group, recipe, train_state, context, plans=plans)
        return pending.run(context, count=group.servers)
    dialer = group.dialer(f"worker-{context.world.rank}", context)
    UpdateWorker(recipe, context, dialer, plans, train_state).run(group.lease)
    return None
