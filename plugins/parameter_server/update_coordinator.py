"""Replica of the leading server, for recipes with several updates per step.

Each update is a barrier: workers continue once all have contributed to it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from plugins.parameter_server.coordinator import AllShards
from plugins.parameter_server.shard_parameters import gather_states
from plugins.parameter_server.task_pool import Unit
from plugins.parameter_server.task_scheduler import TaskScheduler
from worldsize.collectives.exact import reduce_metrics
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import EvaluationBatches, MicroBatch, Replica, RunContext, StateDict, StepResult
from worldsize.errors import WorldsizeError
from worldsize.net.registry import Registry
from worldsize.optimizers.groups import get_trainable_parameters
from worldsize.strategies.gradient_reducer import clip_factor
from worldsize.strategies.loss_record import LossRecord, check_same_form, step_metrics
from worldsize.strategies.loss_scaling import weight_factor
from worldsize.strategies.multi_update import UpdateResult, step_result
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.update_pass import updates_differ

_logger = logging.getLogger(__name__)

_ATTEMPTS = 5  # maximum attempts at one step before the run fails


@final
class UpdateCoordinator(Replica):
    """Replica of the leading server, used by the training loop.

    Args:
        shards: All shards of each optimizer; this process serves the first of each.
        rounds: Synchronizes the updates of the workers.
        registry: The run's service registry, used to end the run.
        train_state: The full model with its optimizers, filled with the shards' state for saving.
        context: The context of the run.
        step_reached: The step of the checkpoint to resume from.
    """

    def __init__(
        self,
        shards: Mapping[str, AllShards],
        rounds: UpdateRounds,
        registry: Registry,
        train_state: TrainState,
        context: RunContext,
        *,
        step_reached: int,
    ) -> None:
        self._shards, self._rounds, self._scheduler, self._registry = shards, rounds, rounds.scheduler, registry
        self._train_state, self._world, self._numerics = train_state, context.world, context.numerics
        self._logs_norm = context.logs_norm
        self.step_reached: int = step_reached

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Let the workers load and compute the next step; repeat it if a worker is lost.

        Raises:
            WorldsizeError: workers were lost in every attempt.
        """
        step = self.step_reached + 1
        rates = {name: shards.own.master.shard.parameters.lr for name, shards in self._shards.items()}
        results, attempts = self._attempt_step(step, again=False), 1
        while results is None:
            if attempts == _ATTEMPTS:
                raise WorldsizeError(
                    f"step {step} was started {attempts} times, and a worker was lost each time. Check the workers' "
                    "logs. If an update takes longer than cluster.timeout, increase cluster.timeout."
                )
            _logger.info("repeating step %d: a worker was lost", step)
            for shards in self._shards.values():
                shards.roll_back()
            results, attempts = self._attempt_step(step, again=True), attempts + 1
        returned = step_metrics(self._scheduler.wait_for_step(step))
        self.step_reached = step
        return step_result(results, rates, returned, kind=self._rounds.kind, step=step)

    def _attempt_step(self, step: int, *, again: bool) -> list[UpdateResult] | None:
        """Compute the updates of ``step``; return None if a worker was lost."""
        counts = {name: shards.own.master.shard.step for name, shards in self._shards.items()}
        self._rounds.start_attempt(step, counts, again=again)
        for shards in self._shards.values():  # while the workers compute the first update
            shards.save_step_start(step)
        results: list[UpdateResult] = []
        while True:
            with measure_phase("communication"):
                reported = self._rounds.wait_for_update(step)
            if reported is None:
                return None
            if not reported.names:
                return results
            with measure_phase("update"):
                results.append(self._applied(reported))
            self._rounds.complete_update()

    def _applied(self, reported: Reported) -> UpdateResult:
        """Weigh and clip the mean gradient, and apply it on all shards of the update's optimizers."""
        counts = {name: self._shards[name].own.master.shard.step + 1 for name in reported.names}
        losses, factor = _weigh_losses(reported.records)
        if factor is not None:
            for name, count in counts.items():
                self._shards[name].scale_gradients(count, factor)
        skipped, clipping, norm = False, 1.0, None
        if self._numerics.needs_norm or self._logs_norm():
            norms = [each for name in reported.names for each in self._compute_part_norms(name)]
            norm = torch.linalg.vector_norm(torch.stack(norms))
        if norm is not None and self._numerics.needs_norm:
            skipped = self._numerics.should_skip_update(norm)
            clipping = float(clip_factor(norm, self._numerics.norm_limit))
        for name, count in counts.items():
            self._shards[name].commit_all_shards(count, None if skipped else clipping)
        return UpdateResult(reported.names, losses, norm, skipped, step_metrics(reported.records))

    def _compute_part_norms(self, name: str) -> list[Tensor]:
        """Return the norm of each parameter's gradient, in the order of the optimizer."""
        pieces = self._shards[name].collect_norms()
        part = self._train_state.parts[name]
        names = {id(parameter): each for each, parameter in part.model.named_parameters()}
        norms = [
            torch.tensor(pieces[names[id(each)]]) for each in get_trainable_parameters(part.optimizer) if each.numel()
        ]
        return [torch.linalg.vector_norm(each) if each.numel() > 1 else each[0] for each in norms]

    def evaluate(self, batches: EvaluationBatches) -> Mapping[str, float]:
        """Let the workers evaluate the split, whose batches they load themselves; return metrics by name."""
        parts = max(1, len(self._scheduler.workers))
        sums, names = self._scheduler.evaluate(parts, split=batches.split, step=batches.step)
        return reduce_metrics(sums, names, self._world)

    def advance_schedules(self, value: float, *, step: int) -> None:
        for shards in self._shards.values():
            shards.advance_schedules(value, step)

    def state(self) -> StateDict:
        """Gather the state of all shards."""
        for name, shards in self._shards.items():
            gather_states(shards.collect_states(), self._train_state.parts[name])
        return {**self._train_state.state(), "scaler": {}}

    def load(self, state: StateDict) -> None:
        """Do nothing: each server loads its own shard."""

    def facts(self) -> Mapping[str, Any]:
        """Return each server's load over all optimizers since the last call, and the worker count."""
        loads = zip(*(shards.collect_loads() for shards in self._shards.values()), strict=True)
        servers = [_combine_loads(each, step=self.step_reached) for each in loads]
        return {"servers": servers, "workers": len(self._scheduler.workers)}

    def close(self, *, complete: bool) -> None:
        self._registry.mark_ended()
        self._scheduler.end_run("the run is complete" if complete else "the run was stopped")
        for shards in self._shards.values():
            shards.stop()


def _weigh_losses(records: Sequence[LossRecord]) -> tuple[list[Tensor], float | None]:
    """Return the loss terms, and the gradient's factor if losses are sums, else None."""
    check_same_form(records)
    if not records[0].is_weighted:
        return [record.loss for record in records], None
    factor = weight_factor([record.loss[1] for record in records], None)
    return [record.loss[0] * factor for record in records], float(factor)


def _combine_loads(loads: Sequence[Mapping[str, Any]], *, step: int) -> dict[str, Any]:
    """Combine the loads (:meth:`ShardServer.collect_server_load`) of one server's shards, one per optimizer."""
    counts = ("lost_updates", "refused", "pushes", "pulls", "bytes_in", "bytes_out")
    largest = {name: max(load[name] for load in loads) for name in ("longest_queue", "seconds")}
    return {"step": step, **{name: sum(load[name] for load in loads) for name in counts}, **largest}


@final
@dataclass
class _Round:
    """One update of the step in progress.

    Attributes:
        updates: For each worker, by name, the optimizers of the update that it has contributed to.
        records: Loss records, by logical rank.
        is_applied: Whether the update is applied. False if the step is abandoned, None while undecided.
    """

    updates: dict[str, tuple[str, ...]] = field(default_factory=dict)
    records: dict[int, LossRecord] = field(default_factory=dict)
    is_applied: bool | None = None


@final
@dataclass(frozen=True)
class Reported:
    """An update with the gradients of all workers.

    Attributes:
        names: The optimizers, empty once the step is complete.
        records: Loss records, by logical rank.
    """

    names: Sequence[str]
    records: Sequence[LossRecord]


@final
class UpdateRounds:
    """Synchronizes the workers of ``scheduler`` at each update of a step.

    If a worker is lost during a step, its share of earlier, already applied updates cannot be recomputed.
    :meth:`wait_for_update` then returns None, and the step must be repeated.

    Args:
        kind: Name of the recipe's class.
        scheduler: Assigns units, and admits and retires workers.
    """

    def __init__(self, kind: str, scheduler: TaskScheduler) -> None:
        self.kind, self.scheduler = kind, scheduler
        self._round = _Round()
        self._counts: Mapping[str, int] = {}
        self._attempt = 0  # total number of attempts at steps

    # ------------------------------------------------------------ for connections

    def next_task(self, name: str, epoch: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Record a worker's contribution to an update, or its task result, and return its next task."""
        with self.scheduler.changed:
            if "update" in facts:
                if self._join_update(name, facts):
                    return {"do": "continue"}
                facts = {}  # drop the unit and, until the end of the next unit, a request to leave
            task = self.scheduler.next_task(name, epoch, facts)
            return {**task, "attempt": self._attempt, "counts": self._counts} if task["do"] == "train" else task

    def _join_update(self, name: str, facts: Mapping[str, Any]) -> bool:
        """Record a worker's contribution, and wait for other workers. Returns False if the step is abandoned."""
        step, ranks = facts["unit_of"]
        member = self.scheduler.staleness.members.get(name)
        if facts["attempt"] != self._attempt or member is None or member.hand != Unit(step, tuple(ranks)):
            return False
        mine = self._round
        mine.updates[name] = tuple(map(str, facts["update"]))
        records = [LossRecord.from_message(message) for message in facts["records"]]
        mine.records.update(zip(ranks, records, strict=True))
        self.scheduler.changed.notify_all()
        self.scheduler.changed.wait_for(lambda: mine.is_applied is not None or self.scheduler.ended is not None)
        return bool(mine.is_applied)

    # ------------------------------------------------------------ for the training loop

    def start_attempt(self, step: int, counts: Mapping[str, int], *, again: bool) -> None:
        """Start or restart ``step``.

        Args:
            step: The step.
            counts: Number of updates of each optimizer, as counted by its shards.
            again: Whether an earlier attempt was abandoned.
        """
        with self.scheduler.changed:
            self._end_round(is_applied=False)
            self._attempt, self._counts = self._attempt + 1, dict(counts)
            if again:
                self.scheduler.staleness.reassign_step()
            self.scheduler.open_steps(step)

    def wait_for_update(self, step: int) -> Reported | None:
        """Wait until all workers have contributed to the next update of ``step``, or finished the step.

        Returns:
            The update, or None if a worker was lost and the step must be repeated.

        Raises:
            ConfigError: Workers are at different updates.
            WorldsizeError: There were no workers for longer than the timeout.
        """
        staleness, current = self.scheduler.staleness, self._round
        before = (step - 1 - staleness.first) * staleness.logical_ranks

        def has_arrived() -> bool:
            ended = staleness.done - before
            return bool(staleness.orphans) or len(current.records) + ended == staleness.logical_ranks

        self.scheduler.wait_for(has_arrived)
        with self.scheduler.changed:
            if staleness.orphans:
                return None
            ends: list[tuple[str, ...]] = [()] if staleness.done > before else []
            first, *others = dict.fromkeys([*current.updates.values(), *ends])
            if others:
                raise updates_differ(self.kind, step, one="one worker", its=first, other="another", has=others[0])
            return Reported(first, [current.records[rank] for rank in sorted(current.records)])

    def complete_update(self) -> None:
        """Release the workers after the update was applied."""
        with self.scheduler.changed:
            self._end_round(is_applied=True)

    def _end_round(self, *, is_applied: bool) -> None:
        self._round.is_applied, self._round = is_applied, _Round()
        self.scheduler.changed.notify_all()
