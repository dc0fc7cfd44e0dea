"""The replica of the leading server: workers compute the steps of the training loop, and shards apply them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from worldsize.core import EvaluationBatches, MicroBatch, Replica, RunContext, StateDict, StepResult
from worldsize.dist.exact import reduce_metrics
from worldsize.dist.step_timer import phase
from worldsize.net.registry import Registry
from worldsize.strategies.clipping import clip_factor
from worldsize.strategies.loss_record import LossRecord, check_same_form, step_metrics
from worldsize.strategies.loss_weights import weight_factor
from worldsize.strategies.parameter_server.all_shards import AllShards
from worldsize.strategies.parameter_server.model_state import full_state, joined_rows
from worldsize.strategies.parameter_server.row_tables import RowRule
from worldsize.strategies.parameter_server.shard_parameters import gather_states
from worldsize.strategies.parameter_server.task_scheduler import TaskScheduler
from worldsize.strategies.train_state import TrainState


@final
class Coordinator(Replica):
    """The replica with which the training loop drives the run.

    Args:
        shards: All shards; this process serves the first.
        scheduler: Assigns tasks to the workers.
        registry: The registry of the run's services, through which the run is ended.
        train_state: A full model, optimizer and schedule, which receive the shards' state when it is saved.
        context: The context of the run; its numerics decide about clipping and non-finite gradients.
        rows: How rows of tables are assigned to servers and kept.
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
        self._rows = rows
        self._shard = shards.own.master.shard
        self._synchronous = self._shard.rule.synchronous
        self.step_reached = self._shard.closed
        shards.reset(self.step_reached, self._shard.last_factor)

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Let the workers compute the next step; they load its data themselves."""
        assert self.step_reached is not None
        step, lr = self.step_reached + 1, self._shard.parameters.lr
        if self._synchronous:
            self._scheduler.open(step)
        with phase("communication"):
            records = self._scheduler.finished(step)
        with phase("update"):
            losses = self._weighed(step, records)
            norm, skipped = self._commit(step) if self._synchronous else (None, False)
        self.step_reached = step
        return StepResult(losses, lr, norm, skipped, step_metrics(records))

    def _weighed(self, step: int, records: Sequence[LossRecord]) -> list[Tensor]:
        """Divide the gradient by the step's weight if losses are sums; return each record's part of the mean loss."""
        check_same_form(records)
        if not records[0].is_weighted:
            return [record.loss for record in records]
        factor = weight_factor([record.loss[1] for record in records], None)
        self._shards.weigh(step, float(factor))
        return [record.loss[0] * factor for record in records]

    def _commit(self, step: int) -> tuple[Tensor | None, bool]:
        """Clip the mean gradient by its norm over all shards, or skip the step if the norm is not finite."""
        norm, factor = self._judged() if self._numerics.needs_norm else (None, 1.0)
        self._shards.apply(step, factor)
        return norm, factor is None

    def _judged(self) -> tuple[Tensor, float | None]:
        """Return the norm of the mean gradient and the factor to multiply it by; None skips the step."""
        norm = torch.linalg.vector_norm(torch.stack(self._norms()))
        if self._numerics.skips(norm):
            return norm, None
        return norm, float(clip_factor(norm, self._numerics.norm_limit))

    def _norms(self) -> list[Tensor]:
        """Return the norm of each parameter's gradient, in the order of the model."""
        pieces = self._shards.norms()
        names = [name for name, _ in self._train_state.model.named_parameters() if name in pieces]
        norms = [torch.tensor(pieces[name]) for name in names]
        return [torch.linalg.vector_norm(each) if each.numel() > 1 else each[0] for each in norms]

    def evaluate(self, batches: EvaluationBatches) -> Mapping[str, float]:
        """Let the workers evaluate; they load the batches themselves. Return the metrics by name."""
        parts = max(1, len(self._scheduler.workers)) if self._synchronous else 1
        sums, names = self._scheduler.evaluate(parts, split=batches.split, step=batches.step)
        return reduce_metrics(sums, names, self._world)

    def advance_schedules(self, value: float, *, step: int) -> None:
        self._shards.advance(value, step)

    def state(self) -> StateDict:
        """Combine the states of all shards."""
        states = self._shards.states()
        gather_states(states, self._train_state)
        return full_state(self._train_state, joined_rows([state["tables"] for state in states]), self._rows)

    def load(self, state: StateDict) -> None:
        """Do nothing: each server has loaded its own part."""

    def facts(self) -> Mapping[str, Any]:
        """Return the load of each server since the last call, and the number of workers."""
        return {"servers": self._shards.facts(), "workers": len(self._scheduler.workers)}

    def close(self, *, complete: bool) -> None:
        self._registry.end()
        self._scheduler.end("the run is complete" if complete else "the run pauses")
        self._shards.stop()
