"""The replica of every strategy in which all ranks take the same optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch
from torch import Tensor, nn

from worldsize.collectives.exact import Sums, reduce_metrics
from worldsize.collectives.step_timer import backward, phase
from worldsize.core import (
    EvaluationBatch,
    MicroBatch,
    Precision,
    Recipe,
    Reduction,
    Replica,
    RunContext,
    StateDict,
    StepResult,
)
from worldsize.reproducibility.seeds import seed_generators
from worldsize.strategies.gradient_reducer import GradientReducer
from worldsize.strategies.loss_record import LossRecord, differentiable, step_metrics
from worldsize.strategies.loss_weights import fp16_share, weight_factor
from worldsize.strategies.reducers import gradient_reducer
from worldsize.strategies.train_state import TrainState

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: Precision) -> AbstractContextManager[None]:
    """Return the context in which ``device`` computes in ``precision``; for fp32 it changes nothing."""
    dtype = _DTYPES.get(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype else nullcontext()


def metric_sums(
    recipe: Recipe, model: nn.Module, batches: Iterable[EvaluationBatch]
) -> tuple[dict[int, Sums], tuple[str, ...]]:
    """Evaluate ``batches`` without gradients.

    Returns:
        By the number of each batch that counts: each metric as (sum, count), two scalars. And the metrics' names.
    """
    sums: dict[int, Sums] = {}
    names: tuple[str, ...] = ()
    with torch.no_grad(), evaluating([model]):
        for batch in batches:
            metrics = recipe.evaluate(model, batch.data)
            names = tuple(sorted(metrics))
            if batch.counted:
                sums[batch.index] = metrics
    return sums, names


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Keep ``models`` in evaluation mode; what the recipe keeps in it while the rest is trained stays there."""
    kept = [module for model in models for module in model.modules() if not module.training]
    for model in models:
        model.eval()
    yield
    for model in models:
        model.train()
    for module in kept:
        module.eval()


@final
class SynchronousReplica(Replica):
    """Accumulates micro-batches and steps once.

    ``module`` is what wraps the model, if something does. With ``sums_alone`` its ``reducer`` sums the micro-batches
    of this process, not those of all.
    """

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
        self.recipe = recipe
        self.world = context.world
        self.model = train_state.model
        self.module = module or train_state.model
        self.numerics = context.numerics
        self.reducer = reducer
        self._group = None if sums_alone or self.world.size == 1 else self.world.group
        self.train_state = train_state
        self.optimizer, self.schedule = train_state.optimizer, train_state.schedule
        self._share: Tensor | None = None  # of a sum in float16, agreed on in each step
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=self.numerics.precision == "fp16")

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self.optimizer.zero_grad()
        self._share = None
        records = self.reducer.run(micro_batches, self._backward)
        losses = self._weighed(records)
        lr: float = self.optimizer.param_groups[0]["lr"]
        with phase("update"):
            norm = self._clip()
            skipped = self._update(norm)
            if self.schedule is not None:
                self.schedule.step()
        return StepResult(losses, lr, norm, skipped, step_metrics(records))

    def _backward(self, batch: MicroBatch, scale: float) -> LossRecord:
        seed_generators(batch.seed, self.world.device)
        with self._autocast():
            loss, record = differentiable(self.recipe.loss(self.module, batch.data))
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

    def _autocast(self) -> AbstractContextManager[None]:
        return autocast(self.world.device, self.numerics.precision)

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

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        with self._autocast():
            sums, names = metric_sums(self.recipe, self.model, batches)
        return reduce_metrics(sums, names, self.world)

    def trained_weights(self) -> Mapping[str, Tensor]:
        named = self.model.state_dict(keep_vars=True)  # before which FSDP divides again what it has gathered
        return {name: each for name, each in named.items() if isinstance(each, nn.Parameter) and each.requires_grad}

    def state(self) -> StateDict:
        own = self.reducer.state()
        return {**self.train_state.state(), "scaler": self.scaler.state_dict(), **({"strategy": own} if own else {})}

    def load(self, state: StateDict) -> None:
        self.train_state.load(state)
        self.scaler.load_state_dict(state["scaler"])
        self.reducer.resumed()
        if "strategy" in state:
            self.reducer.load(state["strategy"])


def alone(recipe: Recipe, model: nn.Module, context: RunContext, reduce: Reduction = "flat") -> SynchronousReplica:
    """Train ``model``, which is on the device of ``context.world``, in this process with no other."""
    sums = gradient_reducer(reduce, model, None)
    return SynchronousReplica(recipe, context, train_state=TrainState.of(recipe, model), reducer=sums, sums_alone=True)
