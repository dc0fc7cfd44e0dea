"""Base class of replicas with a model, whole or sharded, and its optimizers.

``ModelFlags`` saves and restores which submodules are in training mode and which parameters are frozen.
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

from worldsize.checkpoint.manifest_tree import split_tensors
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
from worldsize.optimizers.groups import all_parameters
from worldsize.optimizers.schedule_free import use_evaluation_weights
from worldsize.seeds import keep_generators
from worldsize.strategies.chunk_tensor import ChunkLayout
from worldsize.strategies.compiled import COMPILATIONS
from worldsize.strategies.declared_buffers import declare_buffers
from worldsize.strategies.gradient_reducer import GradientReducer
from worldsize.strategies.layer_streams import LayerStreams
from worldsize.strategies.loss_record import AgreedLosses, LossRecord, check_same_form
from worldsize.strategies.loss_scaling import LossScaler, step_scaled, weight_factor
from worldsize.strategies.loss_watch import LossWatch
from worldsize.strategies.model_passes import prepare_passes
from worldsize.strategies.parameter_changes import GradientHooks
from worldsize.strategies.train_state import OptimizerPart, TrainState

CAPABILITIES: frozenset[Capability] = frozenset(
    {"state_metrics", "loss_scale", "ema", "multi_update", "features", "compile", "activation_checkpointing"}
)
"""Capabilities of strategies with :class:`ModelReplica` and equal weights after each update."""
_T = TypeVar("_T")
_Action = Callable[[], Any]
_Metrics = Mapping[str, tuple[Tensor | float, ...]]


def autocast(device: torch.device, precision: PrecisionName) -> AbstractContextManager[None]:
    """Return the autocast context for ``precision`` on ``device``; it does nothing for fp32."""
    dtype = PRECISIONS[precision].autocast
    return torch.autocast(device.type, dtype=getattr(torch, dtype)) if dtype else nullcontext()


def collect_metrics(
    recipe: Recipe,
    model: nn.Module,
    batches: Iterable[EvaluationBatch],
    *,
    streams: LayerStreams,
    call: Callable[[Callable[[], _Metrics]], _Metrics] | None = None,
    chunks: ChunkLayout | None = None,
) -> MetricCollector:
    """Evaluate ``batches`` without gradients, each with its own random stream.

    Args:
        recipe: The recipe that evaluates batches.
        model: The model, or this process's shard of it.
        batches: Evaluation batches of this process.
        streams: Random streams of this process; the device's generators are restored afterwards.
        call: Wraps each call that computes with the model.
        chunks: The chunks of sequences that this process computes; None: whole sequences.
    """
    collector = MetricCollector(recipe)
    with torch.no_grad(), evaluating([model]), keep_generators(streams.device):
        for batch in batches:
            streams.begin(batch.seed)
            evaluate = partial(recipe.evaluate, model) if chunks is None else partial(chunks.evaluate, recipe, model)
            evaluated = partial(evaluate, batch.data)
            collector.add(batch, evaluated() if call is None else call(evaluated))
    return collector


@final
class CallingRoot(nn.Module):
    """Wraps a model; ``forward`` calls a given function, so that this module's hooks run.

    This supports recipes that call submodules of their model directly, in any order. Checkpoints are created from the
    model itself, so tensor names do not change.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._call: Callable[[_Action], Any] | None = None

    def set_guard(self, call: Callable[[_Action], Any]) -> None:
        """Make :meth:`forward` pass its function to ``call`` instead of calling it directly."""
        self._call = call

    def forward(self, action: _Action) -> Any:
        """Call ``action``, a computation with the model or its submodules."""
        return action() if self._call is None else self._call(action)


class ModelReplica(Replica):
    """Abstract base: evaluates, saves and loads a trained model; subclasses define the step.

    ``module`` wraps the model; its forward pass calls a function without arguments. If ``module`` is a
    :class:`CallingRoot`, around a sharded model, evaluation runs inside it, too. ``sums_alone``: whether ``reducer``
    sums only the micro-batches of this process. ``logical_ranks``: total over all processes, if their shares may
    differ. ``chunks``: the chunks of sequences that this process computes; None: those of ``logical_context``.
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
        logical_ranks: int | None = None,
        chunks: ChunkLayout | None = None,
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
        if chunks is None and self.numerics.logical_context > 1:
            chunks = ChunkLayout(self.numerics.logical_context)
        self.chunks = chunks
        declare_buffers(recipe, self.model, trains_apart=sums_alone and self.world.size > 1)
        # this world does not contain mesh ranks with the same data
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
        self.streams = LayerStreams(recipe, self.model, self.world.device, by_layer=reducer.is_ordered)
        self._steps_begun = 0
        self._agreed = AgreedLosses(None if sums_alone or self.world.size == 1 else self.world)
        self._module, self._root = module, module if isinstance(module, CallingRoot) else None
        if module is not None:
            self._watch.watch_root(module)
        self._parameters = list(self.model.parameters())  # cached, since parameters() walks over all modules
        self._hooks = GradientHooks(self._parameters)

    @property
    def _group(self) -> ProcessGroup | None:
        return self._agreed.group

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        with use_evaluation_weights(self.train_state.optimizers, self.model), self._autocast():
            collector = collect_metrics(
                self.recipe, self.model, batches, streams=self.streams, call=self._run_action, chunks=self.chunks
            )
        return collector.reduce(self.world)

    def _check_saves(self) -> None:
        """Refuse optimizer and schedule state that checkpoints do not support, before step 2."""
        if self._steps_begun == 1:
            split_tensors(self.train_state.state())
        self._steps_begun += 1

    def _run_action(self, action: Callable[[], _T]) -> _T:
        """Call ``action``, which uses the model, inside the :class:`CallingRoot` if there is one."""
        return action() if self._root is None else self._root(action)

    def _autocast(self) -> AbstractContextManager[None]:
        return autocast(self.world.device, self.numerics.precision)

    def trained_weights(self) -> Mapping[str, Tensor]:
        named = self.model.state_dict(keep_vars=True)  # also makes FSDP reshard gathered parameters
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
        self.reducer.on_resume()
        if "strategy" in state:
            self.reducer.load(state["strategy"])

    def facts(self) -> Mapping[str, Any]:
        compiled = COMPILATIONS.collect_statistics(speaks=self.world.rank == 0) if self.numerics.compile else {}
        return {"compiled": compiled} if compiled else {}

    def _scale_loss(self, loss: Tensor, record: LossRecord, scale: float) -> Tensor:
        """Scale the scalar ``loss`` for its backward pass, and summed losses to the float16 range."""
        if self.scaler.is_enabled() and record.is_weighted:
            loss = loss * self._agreed.fp16_share(record.loss[1])
        return self.scaler.scale(loss if scale == 1 else loss * scale)

    def _weigh_gradients(
        self, parameters: Sequence[nn.Parameter], records: Sequence[LossRecord], update: Sequence[str] = ()
    ) -> Sequence[Tensor]:
        """Scale gradients of summed losses by their weights.

        Returns losses whose mean is the step's loss.

        ``update``: names of the optimizers that step, for a recipe with several.
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

    def _step_optimizers(
        self, parts: Sequence[OptimizerPart], parameters: Sequence[nn.Parameter]
    ) -> tuple[Tensor | None, bool, bool]:
        """Clip the gradient, and step the optimizers and schedules.

        The caller must update ``scaler`` at the end of the step, as with any ``torch.amp.GradScaler``.

        Returns:
            The norm before clipping (None if neither needed nor logged), whether the update was skipped, and whether
            that was due to a gradient overflow in float16.
        """
        self._context.faults.report_point("step:update")
        norm, skipped, overflowed = None, False, False
        if self.numerics.needs_norm:
            for part in parts:
                self.scaler.unscale_(part.optimizer)
            norm = self.reducer.clip(parameters, self.numerics.norm_limit)
            skipped = self.numerics.should_skip_update(norm)
        elif self._context.logs_norm():
            norm = self._compute_logged_norm(parts, parameters)
        for part in parts:
            if not skipped:
                overflowed |= not step_scaled(self.scaler, part.optimizer, speaks=self.world.rank == 0)
            if part.schedule is not None:
                part.schedule.step()
        self._context.faults.report_point("step:updated")
        return norm, skipped or overflowed, overflowed

    def _compute_logged_norm(self, parts: Sequence[OptimizerPart], parameters: Sequence[nn.Parameter]) -> Tensor | None:
        """Return the unscaled gradient norm of the parameters that ``parts`` update.

        Gradients of other parameters are never reset, and include earlier steps.
        """
        own = {id(parameter) for part in parts for parameter in all_parameters(part.optimizer)}
        others = [(each, each.grad) for each in parameters if each.grad is not None and id(each) not in own]
        for parameter, _ in others:
            parameter.grad = None
        norm = self.reducer.compute_norm(parameters)
        for parameter, gradient in others:
            parameter.grad = gradient
        return None if norm is None else norm / self.scaler.scale(torch.ones_like(norm))


@final
class ModelModes:
    """A snapshot of the training mode of each module in ``models``, parents first."""

    def __init__(self, *models: nn.Module) -> None:
        self._modes = [(module, module.training) for model in models for module in model.modules()]

    def restore(self) -> None:
        """Restore the mode of each module, independently of its parents and children.

        ``train`` is called for modules with a different mode, since user code may override it, for example to merge
        adapters. It also changes the modes of children, so all modes are then set directly.
        """
        for module, mode in self._modes:
            if module.training != mode:
                module.train(mode)
        for module, mode in self._modes:
            if module.training != mode:
                module.training = mode


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put ``models`` in evaluation mode within the block, then restore their modes and buffers.

    Buffers are restored because each process evaluates different batches.
    """
    modes = ModelModes(*models)
    with keep_buffers(models):
        for model in models:
            model.eval()
        try:
            yield
        finally:
            modes.restore()


@contextmanager
def keep_buffers(models: Sequence[nn.Module]) -> Iterator[None]:
    """Restore all buffers of ``models`` at the end of the block, whether they are saved or not."""
    owners = [module._buffers for model in models for module in model.modules()]
    kept = [
        (owner, name, each, each._version, each.clone())
        for owner in owners
        for name, each in owner.items()
        if each is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, version, before in kept:
                owner[name] = buffer if buffer._version == version else buffer.copy_(before)


@final
class ModelFlags:
    """A snapshot of all modules' training modes and all parameters' ``requires_grad`` flags."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modes = ModelModes(model)
        self._trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore(self) -> None:
        """Restore flags that differ from the snapshot."""
        self._modes.restore()
        for parameter, requires_grad in self._trained:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
