"""The leading server: workers compute the training loop's steps, and shards apply them.

``run_server`` runs one server; the server of shard 0 also leads the training. ``Coordinator`` is its replica.
``AllShards`` sends requests to all shards, including its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from plugins.parameter_server.protocol import Operation, Peer, Peers, shard_service
from plugins.parameter_server.row_tables import RowRule
from plugins.parameter_server.server import ShardServer
from plugins.parameter_server.server_group import PendingServer, full_state, join_rows
from plugins.parameter_server.shard_parameters import gather_states
from plugins.parameter_server.task_pool import StalenessScheduler
from plugins.parameter_server.task_scheduler import TaskScheduler, TaskService
from worldsize.collectives.exact import reduce_metrics
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import ONE_UPDATE, EvaluationBatches, MicroBatch, Replica, RunContext, StateDict, StepResult
from worldsize.net.registry import EndedError, Registry
from worldsize.strategies.gradient_reducer import clip_factor
from worldsize.strategies.loss_record import LossRecord, check_same_form, step_metrics
from worldsize.strategies.loss_scaling import weight_factor
from worldsize.strategies.train_state import TrainState


@final
class Coordinator(Replica):
    """Replica of the leading server, used by the training loop.

    Args:
        shards: All shards; this process serves shard 0.
        scheduler: Assigns tasks to the workers.
        registry: The run's service registry, used to end the run.
        train_state: A full model, optimizer and schedule, filled with the shards' state for saving.
        context: The context of the run; its numerics control clipping and non-finite gradients.
        rows: How table rows are assigned to servers and retained.
    """

    def __init__(
        self,
        shards: AllShards,
        scheduler: TaskScheduler,
        registry: Registry,
        train_state: TrainState,
        context: RunContext,
        *,
        rows: RowRule,
    ) -> None:
        self._shards, self._scheduler, self._registry = shards, scheduler, registry
        self._train_state, self._world, self._numerics = train_state, context.world, context.numerics
        self._logs_norm = context.logs_norm
        self._rows = rows
        self._shard = shards.own.master.shard
        self._synchronous = self._shard.rule.synchronous
        self.step_reached = self._shard.closed
        shards.reset_all_shards(self.step_reached, self._shard.last_factor)

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Let the workers compute the next step. ``micro_batches`` is unused: workers load the data."""
        assert self.step_reached is not None
        step, lr = self.step_reached + 1, self._shard.parameters.lr
        if self._synchronous:
            self._scheduler.open_steps(step)
        with measure_phase("communication"):
            records = self._scheduler.wait_for_step(step)
        with measure_phase("update"):
            losses = self._weigh_losses(step, records)
            norm, skipped = self._commit_update(step) if self._synchronous else (None, False)
        self.step_reached = step
        return StepResult(losses, lr, norm, skipped, step_metrics(records))

    def _weigh_losses(self, step: int, records: Sequence[LossRecord]) -> list[Tensor]:
        """Divide the gradient by the total weight if losses are sums; return one loss per logical rank."""
        check_same_form(records)
        if not records[0].is_weighted:
            return [record.loss for record in records]
        factor = weight_factor([record.loss[1] for record in records], None)
        self._shards.scale_gradients(step, float(factor))
        return [record.loss[0] * factor for record in records]

    def _commit_update(self, step: int) -> tuple[Tensor | None, bool]:
        """Commit ``step``, clipped by the norm over all shards; return the norm and whether the update was skipped."""
        norm: Tensor | None = None
        factor: float | None = 1.0
        if self._numerics.needs_norm:
            norm, factor = self._compute_clipping()
        elif self._logs_norm() and not self._shard.parameters.tables:
            norm = self._compute_norm()
        self._shards.commit_all_shards(step, factor)
        return norm, factor is None

    def _compute_clipping(self) -> tuple[Tensor, float | None]:
        """Return the norm of the mean gradient, and the clipping factor (None: skip the step)."""
        norm = self._compute_norm()
        if self._numerics.should_skip_update(norm):
            return norm, None
        return norm, float(clip_factor(norm, self._numerics.norm_limit))

    def _compute_norm(self) -> Tensor:
        """Return the norm of the mean gradient, a scalar, computed from parameter norms in model order."""
        pieces = self._shards.collect_norms()
        names = [name for name, _ in self._train_state.model.named_parameters() if name in pieces]
        norms = [torch.tensor(pieces[name]) for name in names]
        own = [torch.linalg.vector_norm(each) if each.numel() > 1 else each[0] for each in norms]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(own))
        return norm

    def evaluate(self, batches: EvaluationBatches) -> Mapping[str, float]:
        """Let the workers evaluate the split, whose batches they load themselves; return metrics by name."""
        parts = max(1, len(self._scheduler.workers)) if self._synchronous else 1
        sums, names = self._scheduler.evaluate(parts, split=batches.split, step=batches.step)
        return reduce_metrics(sums, names, self._world)

    def advance_schedules(self, value: float, *, step: int) -> None:
        self._shards.advance_schedules(value, step)

    def state(self) -> StateDict:
        """Gather the state of all shards."""
        states = self._shards.collect_states()
        gather_states(states, self._train_state.parts[ONE_UPDATE])
        return full_state(self._train_state, join_rows([state["tables"] for state in states]), self._rows)

    def load(self, state: StateDict) -> None:
        """Do nothing: each server loads its own shard."""

    def facts(self) -> Mapping[str, Any]:
        """Return each server's load since the last call, and the number of workers."""
        return {"servers": self._shards.collect_loads(), "workers": len(self._scheduler.workers)}

    def close(self, *, complete: bool) -> None:
        self._registry.mark_ended()
        self._scheduler.end_run("the run is complete" if complete else "the run was stopped")
        self._shards.stop()


def run_server(pending: PendingServer, context: RunContext, *, bound: float, rows: RowRule) -> Coordinator | None:
    """Wait to become the master of a shard, and serve it until the run ends.

    Args:
        pending: The server.
        context: The context of the run.
        bound: The maximum number of clocks by which workers may be apart.
        rows: How table rows are assigned to servers and retained.

    Returns:
        On the master of shard 0, the replica for the training loop, once there are workers. Otherwise None, after the
        run ends.
    """
    try:
        pending.succession.run()
    except EndedError:
        return None
    if pending.succession.mastership.service == shard_service(0):
        return _lead_run(pending, context, bound=bound, rows=rows)
    server = pending.serve(on_step=context.faults.report_step)  # on the leader, the training loop reports its steps
    server.master.log.ended.wait()
    return None


def _lead_run(pending: PendingServer, context: RunContext, *, bound: float, rows: RowRule) -> Coordinator:
    dialer, lease = pending.dialer, pending.lease
    staleness = StalenessScheduler(bound, context.logical_ranks, lease, first=pending.shard.closed)
    scheduler = TaskScheduler(staleness, timeout=dialer.timeout)
    tasks = TaskService(scheduler)
    server = pending.serve(services={"control": tasks.serve_control, "beat": tasks.receive_heartbeats})
    scheduler.wait_for_workers(context.workers, seconds=lease)
    if bound:
        scheduler.open_steps(context.steps)
    shards = AllShards(server, Peers(dialer, range(1, rows.shards)))
    return Coordinator(shards, scheduler, dialer.registry, pending.train_state, context, rows=rows)


@final
class AllShards:
    """All shards, for the leading server: its ``own`` shard, and those of its ``peers``."""

    def __init__(self, own: ShardServer, peers: Peers) -> None:
        self.own, self._master, self._peers = own, own.master, peers

    def reset_all_shards(self, step: int, factor: float | None) -> None:
        """Reset all shards to the step of this new leader; see :meth:`Shard.reset_to_step`."""
        self._master.reset_shard(step, factor)
        self._peers.send_commands(Operation.RESET, {"step": step, "factor": factor})

    def commit_all_shards(self, step: int, factor: float | None) -> None:
        """Commit the update of ``step`` on all shards; see :meth:`Shard.commit_step`."""
        self._master.commit_update(step, factor)  # final from here on, even if this server dies
        self._peers.send_commands(Operation.APPLY, {"step": step, "factor": factor})

    def save_step_start(self, step: int) -> None:
        """Save the state of all shards at the start of ``step``; see :class:`StepStart`."""
        self.own.start_of_step.save_state(step)
        self._peers.send_commands(Operation.BEGIN, {"step": step})

    def roll_back(self) -> None:
        """Restore all shards to the start of the step; see :meth:`StepStart.roll_back`."""
        updates = self._master.shard.step + 1  # number of the update in progress
        self.own.start_of_step.roll_back(updates)
        self._peers.send_commands(Operation.ROLL_BACK, {"updates": updates})

    def scale_gradients(self, step: int, factor: float) -> None:
        """Scale the mean gradient of ``step`` on all shards by ``factor``; see :meth:`Shard.scale_gradient`."""
        self._master.scale_step_gradient(step, factor)
        self._peers.send_commands(Operation.WEIGH, {"step": step, "factor": factor})

    def advance_schedules(self, value: float, step: int) -> None:
        """Advance the schedules of all shards by a metric; see :meth:`ShardMaster.advance_schedule`."""
        self._master.advance_schedule(value, step)
        self._peers.send_commands(Operation.ADVANCE, {"value": value, "step": step})

    def collect_norms(self) -> dict[str, list[float]]:
        """Return the norms of the uncommitted gradient's pieces, by parameter."""
        norms = self._master.compute_step_norms()
        for others in self._peers.request_messages(Operation.NORMS):
            for name, more in others.items():
                norms.setdefault(name, []).extend(more)
        return norms

    def collect_states(self) -> list[Mapping[str, Any]]:
        """Return a copy of each shard's state."""
        return [self._master.state(), *self._peers.call_peers(Peer.request_state)]

    def collect_loads(self) -> list[Mapping[str, Any]]:
        """Return each server's load since the last call."""
        return [self.own.collect_server_load(), *self._peers.request_messages(Operation.FACTS)]

    def stop(self) -> None:
        """Notify all servers that the run has ended."""
        self._master.log.ended.set()
        self._peers.send_commands(Operation.STOP, {})
