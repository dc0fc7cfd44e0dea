"""The replica of every strategy in which all ranks take the same optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor, nn

from worldsize.collectives.step_timer import backward, phase
from worldsize.core import MicroBatch, Recipe, RunContext, StepResult
from worldsize.reproducibility.seeds import seed_generators
from worldsize.strategies.gradient_reducer import GradientReducer
from worldsize.strategies.loss_record import LossRecord, differentiable, step_metrics
from worldsize.strategies.loss_weights import fp16_share, weight_factor
from worldsize.strategies.model_replica import ModelReplica
from worldsize.strategies.train_state import TrainState


@final
class SynchronousReplica(ModelReplica):
    """Accumulates micro-batches and steps once; ``module`` is what wraps the model, if something does."""

    def __init__(
        self,
        recipe: Recipe,
        context: RunContext,
        *,
        train_state: TrainState,
        reducer: GradientReducer,
        module: nn.Module | None = None,
        sums_alone: bool = False,
    ) -> None:
        super().__init__(recipe, context, train_state=train_state, reducer=reducer, sums_alone=sums_alone)
        self.module = module or train_state.model
        self.optimizer, self.schedule = train_state.optimizer, train_state.schedule
        self._share: Tensor | None = None  # of a sum in float16, agreed on in each step

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self.optimizer.zero_grad()
        self._share = None
        records = self.reducer.run(micro_batches, self._backward)
        losses = self._weighed(records)
        lr: float | None = self.optimizer.param_groups[0].get("lr")
        with phase("update"):
            norm = self._clip()
            skipped = self._update(norm)
            if self.schedule is not None:
                self.schedule.step()
        return StepResult(losses, lr, norm, skipped, step_metrics(records))

    def _backward(self, batch: MicroBatch, scale: float) -> LossRecord:
        seed_generators(batch.seed, self.world.device)
        with self._autocast():
            loss, record = differentiable(self.recipe.loss_at(self.module, batch.data, batch.step))
        if self.scaler.is_enabled() and record.is_weighted:
            loss = loss * self._fp16_share(record)
        scaled = self.scaler.scale(loss if scale == 1 else loss * scale)
        if self.module is self.model:
            scaled.backward()  # type: ignore[no-untyped-call]
        else:
            backward(scaled)
        return record

    def _fp16_share(self, record: LossRecord) -> Tensor:
        if self._share is None:
            self._share = fp16_share(record.loss[1], self._group)
        return self._share

    def _weighed(self, records: Sequence[LossRecord]) -> Sequence[Tensor]:
        """Divide the gradient by the weight of the step if its losses are sums; return shares of the mean loss."""
        if not records[0].is_weighted:
            return [record.loss for record in records]
        factor = weight_factor([record.loss[1] for record in records], self._group)
        self.reducer.scale(list(self.model.parameters()), factor if self._share is None else factor / self._share)
        return [record.loss[0] * factor for record in records]

    def _clip(self) -> Tensor | None:
        """Clip the gradient, and return its norm before; None if it is neither clipped nor has to be finite."""
        if not self.numerics.needs_norm:
            return None
        self.scaler.unscale_(self.optimizer)
        return self.reducer.clip(list(self.model.parameters()), self.numerics.norm_limit)

    def _update(self, norm: Tensor | None) -> bool:
        """Step the optimizer; return True if the step was left out. Gradients are equal on all ranks, so all agree."""
        skipped = norm is not None and self.numerics.skips(norm)
        if not skipped:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        return skipped
