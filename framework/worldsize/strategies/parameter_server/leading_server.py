"""Runs one server; the server of the first shard also leads the training."""

from __future__ import annotations

from worldsize.core import RunContext
from worldsize.net.registry import EndedError
from worldsize.strategies.parameter_server.all_shards import AllShards
from worldsize.strategies.parameter_server.coordinator import Coordinator
from worldsize.strategies.parameter_server.operations import shard_service
from worldsize.strategies.parameter_server.peers import Peers
from worldsize.strategies.parameter_server.row_tables import RowRule
from worldsize.strategies.parameter_server.server_group import PendingServer
from worldsize.strategies.parameter_server.staleness import StalenessScheduler
from worldsize.strategies.parameter_server.task_scheduler import TaskScheduler
from worldsize.strategies.parameter_server.task_service import TaskService


def run_server(pending: PendingServer, context: RunContext, *, bound: float, rows: RowRule) -> Coordinator | None:
    """Serve a shard from when this server becomes its master, if ever, until the run ends.

    Args:
        pending: The server.
        context: The context of the run.
        bound: The number of clocks that the fastest worker may be ahead of the slowest.
        rows: How rows of tables are dealt to the servers and kept.

    Returns:
        The replica by which the training loop leads the run, as soon as there are workers, if this is the master of the
        first shard; None when the run is over, if it is not.
    """
    try:
        pending.succession.run()
    except EndedError:
        return None
    if pending.succession.mastership.service == shard_service(0):
        return _lead(pending, context, bound=bound, rows=rows)
    server = pending.serve(on_step=context.faults.enter)  # at the server that leads, the training loop tells the steps
    server.master.log.ended.wait()
    return None


def _lead(pending: PendingServer, context: RunContext, *, bound: float, rows: RowRule) -> Coordinator:
    dialer, lease = pending.dialer, pending.lease
    staleness = StalenessScheduler(bound, context.logical_ranks, lease, first=pending.shard.closed)
    scheduler = TaskScheduler(staleness, timeout=dialer.timeout)
    tasks = TaskService(scheduler)
    server = pending.serve(services={"control": tasks.control, "beat": tasks.beat})
    scheduler.meet(context.workers, seconds=lease)
    if bound:
        scheduler.open(context.steps)
    shards = AllShards(server, Peers(dialer, range(1, rows.shards)))
    return Coordinator(shards, scheduler, dialer.registry, pending.train_state, context, rows=rows)
