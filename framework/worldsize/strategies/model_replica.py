"""Base class of replicas that hold a whole model, or a shard of each of its tensors, with its optimizers.

``ModelFlags`` saves and restores which parts of a model are in training mode and which are frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from worldsize.checkpoint.manifest_tree import split
from worldsize.core import (
    PRECISIONS,
    Capability,
    EvaluationBatch,
    PrecisionName,
    Recipe,
    Replica,
    RunContext,
    StateDict,
)
from worldsize.metrics import MetricCollector
from worldsize.optimizers.schedule_free import evaluated_weights
from worldsize.record.determinism import generators_kept, seed_generators
from worldsize.strategies.compiled import COMPILATIONS
from worldsize.strategies.declared_buffers import declare_buffers
from worldsize.strategies.gradient_reducer import GradientReducer
from worldsize.strategies.loss_record import AgreedLosses, LossRecord, check_same_form
from worldsize.strategies.loss_scaling import LossScaler, step_scaled, weight_factor
from worldsize.strategies.loss_watch import LossWatch
from worldsize.strategies.model_passes import prepare_passes
from worldsize.strategies.train_state import OptimizedModel, TrainState

CAPABILITIES: frozenset[Capability] = frozenset(
    {"state_metrics", "loss_scale", "ema", "multi_update", "features", "compile", "activation_checkpointing"}
)
"""What a strategy supports whose replicas are :class:`ModelReplica`, with the same weights after each update."""
_T = TypeVar("_T")
_Metrics = Mapping[str, tuple[Tensor, ...]]


def autocast(device: torch.device, precision: PrecisionName) -> AbstractContextManager[None]:
    """Return the autocast context of ``device`` for ``precision``; for fp32 it does nothing."""
    dtype = PRECISIONS[precision].autocast
    return torch.autocast(device.type, dtype=getattr(torch, dtype)) if dtype else nullcontext()


def collected_metrics(
    recipe: Recipe,
    model: nn.Module,
    batches: Iterable[EvaluationBatch],
    *,
    device: torch.device,
    call: Callable[[Callable[[], _Metrics]], _Metrics] | None = None,
) -> MetricCollector:
    """Evaluate ``batches`` without gradients, each with its own random stream.

    Args:
        recipe: The recipe that evaluates a batch.
        model: The model, or this process's part of it.
        batches: Evaluation batches of this process.
        device: Device of this process. The states of its random generators are restored afterwards.
        call: Calls the function that computes with the model.
    """
    collector = MetricCollector(recipe)
    with torch.no_grad(), evaluating([model]), generators_kept(device):
        for batch in batches:
            seed_generators(batch.seed, device)
            evaluated = partial(recipe.evaluate, model, batch.data)
            collector.add(batch, evaluated() if call is None else call(evaluated))
    return collector


class ModelReplica(Replica):
    """Abstract base: evaluates, saves and loads a model that this process trains; subclasses define the step.

    With ``sums_alone`` its ``reducer`` sums only the micro-batches of this process, not those of all processes.
    ``logical_ranks``: those of all processes if these may have different numbers of them.
    """

    def __init__(
        self,
        recipe: Recipe,
        context: RunContext,
        *,
        train_state: OptimizedModel,
        reducer: GradientReducer,
        sums_alone: bool = False,
        logical_ranks: int | None = None,
    ) -> None:
        self.recipe = recipe
        self.world = context.world
        self.numerics = context.numerics
        self._context = context
        self.model = train_state.model
        self.train_state = train_state
        self.reducer, self.dealing = reducer, reducer.dealing
        self.scaler = LossScaler(self.world.device.type, enabled=self.numerics.policy.scales_loss)
        self._logical_ranks = logical_ranks
        declare_buffers(recipe, self.model, trains_apart=sums_alone and self.world.size > 1)
        # the ranks of a mesh with the same data are in other worlds than this one's
        divides = reducer.divides_gradients and dist.is_initialized()
        passes_over = dist.get_world_size() // self.world.size if divides else 1
        self._watch = LossWatch(
            self.model,
            processes=1 if sums_alone else self.world.size * passes_over,
            logical_ranks=max(1, context.logical_ranks // self.world.size) if sums_alone else context.logical_ranks,
            ordered=reducer.is_ordered,
            compiles=self.numerics.compile,
            passes_over=passes_over,
        )
        prepare_passes(recipe, self.model, self.numerics, self.world.device)
        self._steps_begun = 0
        self._agreed = AgreedLosses(None if sums_alone or self.world.size == 1 else self.world)

    @property
    def _group(self) -> ProcessGroup | None:
        return self._agreed.group

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        with evaluated_weights(self.train_state.optimizers, self.model), self._autocast():
            collector = collected_metrics(self.recipe, self.model, batches, device=self.world.device, call=self._call)
        return collector.reduce(self.world)

    def _check_saves(self) -> None:
        """Refuse, before the second step, optimizers and schedules with values that a checkpoint cannot hold."""
        if self._steps_begun == 1:
            split(self.train_state.state())
        self._steps_begun += 1

    def _call(self, action: Callable[[], _T]) -> _T:
        """Call ``action``, which computes with the model or parts of it."""
        return action()

    def _autocast(self) -> AbstractContextManager[None]:
        return autocast(self.world.device, self.numerics.precision)

    def trained_weights(self) -> Mapping[str, Tensor]:
        named = self.model.state_dict(keep_vars=True)  # which first makes FSDP reshard gathered parameters
        return {name: each for name, each in named.items() if isinstance(each, nn.Parameter) and each.requires_grad}

    def advance_schedules(self, value: float, *, step: int) -> None:
        for schedule in self.train_state.schedules:
            schedule.advance_by(value, step=step)

    def state(self) -> StateDict:
        own = self.reducer.state()
        return {**self.train_state.state(), "scaler": self.scaler.state_dict(), **({"strategy": own} if own else {})}

    def load(self, state: StateDict) -> None:
        self.train_state.load(state)
        self.scaler.load_state_dict(state["scaler"])
        self.reducer.resumed()
        if "strategy" in state:
            self.reducer.load(state["strategy"])

    def facts(self) -> Mapping[str, Any]:
        compiled = COMPILATIONS.facts(speaks=self.world.rank == 0) if self.numerics.compile else {}
        return {"compiled": compiled} if compiled else {}

    def _scaled(self, loss: Tensor, record: LossRecord, scale: float) -> Tensor:
        """Return the scalar of the backward pass: ``loss`` times ``scale``; sums in float16 are scaled to its range."""
        if self.scaler.is_enabled() and record.is_weighted:
            loss = loss * self._agreed.fp16_share(record.loss[1])
        return self.scaler.scale(loss if scale == 1 else loss * scale)

    def _weighed(
        self, parameters: Sequence[nn.Parameter], records: Sequence[LossRecord], update: Sequence[str] = ()
    ) -> Sequence[Tensor]:
        """Divide the gradient by the total weight if losses are sums; return each record's part of the mean loss.

        ``update``: names of the optimizers that step, if a recipe has several.
        """
        share = self._agreed.take_share()
        check_same_form(records)
        self._agreed.check_form(records[0], update)
        if not records[0].is_weighted:
            return [record.loss for record in records]
        weights = [record.loss[1] for record in records]
        factor = weight_factor(weights, self._group, self.dealing, logical_ranks=self._logical_ranks)
        self.reducer.scale(parameters, factor if share is None else factor / share)
        return [record.loss[0] * factor for record in records]

    def _stepped(
        self, parts: Sequence[TrainState], parameters: Sequence[nn.Parameter]
    ) -> tuple[Tensor | None, bool, bool]:
        """Clip the gradient, which is the same on all ranks, and let the optimizers and their schedules step.

        The caller updates ``scaler`` at the end of the step, as a loop with ``torch.amp.GradScaler`` does.

        Returns:
            The norm before clipping (None if it is not needed), whether the update was skipped, and whether that was
            since a gradient overflowed in float16.
        """
        self._context.faults.at("step:update")
        norm, skipped, overflowed = None, False, False
        if self.numerics.needs_norm:
            for part in parts:
                self.scaler.unscale_(part.optimizer)
            norm = self.reducer.clip(parameters, self.numerics.norm_limit)
            skipped = self.numerics.skips(norm)
        for part in parts:
            if not skipped:
                overflowed |= not step_scaled(self.scaler, part.optimizer, speaks=self.world.rank == 0)
            if part.schedule is not None:
                part.schedule.step()
        self._context.faults.at("step:updated")
        return norm, skipped or overflowed, overflowed


@final
class ModelModes:
    """A snapshot of the training mode of each module of ``models``, in the order of ``modules()``: parents first."""

    def __init__(self, *models: nn.Module) -> None:
        self._modes = [(module, module.training) for model in models for module in model.modules()]

    def restore(self) -> None:
        """Restore the mode of each module, whatever the modes of its parents and children.

        ``train`` is called where modes differ, since a program may have overridden it, such as to merge adapters. It
        also sets the modes of children, some of them shared with other modules, so that all are set once more.
        """
        for module, mode in self._modes:
            if module.training != mode:
                module.train(mode)
        for module, mode in self._modes:
            if module.training != mode:
                module.training = mode


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put ``models`` in evaluation mode within the block; afterwards their modules have their own modes again.

    Buffers have the values from before: each process evaluates other batches.
    """
    modes = ModelModes(*models)
    owners = [module._buffers for model in models for module in model.modules()]
    kept = [
        (owner, name, each, each._version, each.clone())
        for owner in owners
        for name, each in owner.items()
        if each is not None
    ]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        modes.restore()
        with torch.no_grad():
            for owner, name, buffer, version, before in kept:
                owner[name] = buffer if buffer._version == version else buffer.copy_(before)


@final
class ModelFlags:
    """A snapshot of the training modes of all modules of ``model``, and of which parameters require gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modes = ModelModes(model)
        self._trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore(self) -> None:
        """Restore the flags of the snapshot where they differ."""
        self._modes.restore()
        for parameter, requires_grad in self._trained:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
