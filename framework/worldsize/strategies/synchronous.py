"""The replica of every strategy in which all ranks take the same optimizer step, also of a process that trains alone.

``CallingRoot`` is the module around a model inside whose forward pass a whole loss is computed. ``RepeatedPasses``
lets a recipe that keeps values compute a micro-batch twice in a step, where the first result is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel

from worldsize.collectives.per_rank import make_equal
from worldsize.collectives.step_timer import backward, phase, time_buffers
from worldsize.core import (
    FeatureRecipe,
    MicroBatch,
    MultiUpdateRecipe,
    Recipe,
    Reduction,
    RunContext,
    StepResult,
    World,
    saves_state,
)
from worldsize.record.determinism import seed_generators
from worldsize.strategies.buffer_combinations import StepShape
from worldsize.strategies.gathered_features import GatheredFeatures
from worldsize.strategies.gradient_reducer import GradientReducer
from worldsize.strategies.loss_record import LossRecord, step_metrics, trainable
from worldsize.strategies.model_replica import ModelReplica
from worldsize.strategies.multi_train_state import MultiTrainState
from worldsize.strategies.multi_update import MultiUpdateReplica
from worldsize.strategies.parameter_changes import GradientHooks, ParameterChanges
from worldsize.strategies.reducers import gradient_reducer, update_reducer
from worldsize.strategies.train_state import TrainState


@final
class SynchronousReplica(ModelReplica):
    """Accumulates micro-batches and steps once.

    ``module`` wraps the model, and calls a function of no arguments inside its forward pass: the whole loss, so that it
    may use any part of the model. A sharded model, in a CallingRoot, is also evaluated inside it.
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
    ) -> None:
        super().__init__(
            recipe,
            context,
            train_state=train_state,
            reducer=reducer,
            sums_alone=sums_alone,
            logical_ranks=logical_ranks,
        )
        self._module = module
        if module is not None:
            self._watch.include(module)
        self._root = module if isinstance(module, CallingRoot) else None
        self._part, self.optimizer = train_state, train_state.optimizer
        self._passes = RepeatedPasses(recipe)
        self._parameters = list(self.model.parameters())  # cached, since it walks over all modules
        self._hooks = GradientHooks(self._parameters)
        divides = reducer.divides_gradients
        self._changes = ParameterChanges(self.model, hooks=divides) if divides or self.world.size > 1 else None
        self._features: GatheredFeatures | None = None
        if isinstance(recipe, FeatureRecipe) and context.logical_ranks > 1:
            self._features = GatheredFeatures(recipe, self.model, self.world.device, self._call)

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self._check_saves()
        try:
            losses, metrics = self._computed(micro_batches)
        except BaseException:  # a gang that heals repeats the step
            self.reducer.undo()
            raise
        self.reducer.commit()
        lr: float | None = self.optimizer.param_groups[0].get("lr")
        with phase("update"):
            norm, skipped, overflowed = self._stepped([self._part], self._parameters)
            self.scaler.update()
        return StepResult(losses, lr, norm, skipped, metrics, overflowed=overflowed)

    def _computed(self, micro_batches: Sequence[MicroBatch]) -> tuple[Sequence[Tensor], Mapping[str, Tensor]]:
        """Leave the step's mean gradient in ``.grad``; return the losses and metrics, which the loop has been given."""
        self.optimizer.zero_grad()
        try:
            with self._watch.watching(), self._hooks.suspended():
                if self._features is not None:
                    shape = StepShape.of(self._group, self.dealing, len(micro_batches), self._logical_ranks)
                    with self._autocast():
                        self._features.gather(micro_batches, shape, self._passes.dropped)
                records = self._watch.reduce(partial(self.reducer.run, micro_batches, self._backward))
            self._watch.end_step()
        finally:  # also where DDP misses the gradient of a parameter that was frozen
            if self._changes is not None:
                self._changes.check()
        self._context.faults.at("step:reduced")
        losses = self._weighed(self._parameters, records)
        self._hooks.run(self._parameters)
        metrics = step_metrics(records)
        self._context.before_update(losses, metrics)
        return losses, metrics

    def _backward(self, batch: MicroBatch, scale: float) -> LossRecord:
        with self._passes.dropped(batch) if scale == 0 else nullcontext():
            return self._pass(batch, scale)

    def _pass(self, batch: MicroBatch, scale: float) -> LossRecord:
        self._context.faults.at("step:forward")
        seed_generators(batch.seed, self.world.device)
        with self._autocast():
            compute = partial(self._loss, batch)
            loss, record = compute() if self._module is None else self._module(compute)
        self._agreed.check_form(record)
        self._context.faults.at("step:backward")
        scaled = self._scaled(loss, record, scale)
        if self._module is self._root:
            scaled.backward()  # type: ignore[no-untyped-call]
        else:
            backward(scaled)
        self._context.faults.at("step:reduce")
        return record

    def _call(self, action: Callable[[], Any]) -> Any:
        return action() if self._root is None else self._root(action)

    def _loss(self, batch: MicroBatch) -> tuple[Tensor, LossRecord]:
        """Return the scalar loss of a micro-batch and its record; wrappers find the tensors in a tuple."""
        if self._features is not None:
            return trainable(self._features.loss(batch))
        return trainable(self.recipe.micro_batch_loss(self.model, batch))


_Action = Callable[[], Any]


@final
class CallingRoot(nn.Module):
    """Holds a model, and calls any function inside the hooks of its own forward pass.

    It is needed because a recipe may call parts of its model directly, in any order. The model's tensors keep their
    names, since checkpoints are made of the model itself.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._call: Callable[[_Action], Any] | None = None

    def guard(self, call: Callable[[_Action], Any]) -> None:
        """Let ``call`` call the functions that are given to this module."""
        self._call = call

    def forward(self, action: _Action) -> Any:
        """Call ``action``, which computes with the model or parts of it."""
        return action() if self._call is None else self._call(action)


def replicated(
    model: nn.Module, world: World, *, interruptible: bool = False, **options: Any
) -> DistributedDataParallel:
    """Wrap ``model`` so that its gradients are averaged over ``world.group`` during backward.

    The wrapper's forward pass calls a function of no arguments, such as the loss of a micro-batch. So the function may
    use any part of the model, and any parameter.

    ``interruptible``: the waits for its first weights end when the gang does; DDP's own do not.
    """
    devices = [world.device] if world.device.type == "cuda" else None
    root = CallingRoot(model)
    sparse = [name for name, buffer in root.named_buffers() if buffer.layout is not torch.strided]
    # they cannot be broadcast, and the recipe makes them equal on all ranks
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(root, sparse)  # type: ignore[no-untyped-call]
    if interruptible:
        assert world.group is not None
        _verify_param_shape_across_processes(world.group, [each for each in model.parameters() if each.requires_grad])
        make_equal(model, world.group)
    module = DistributedDataParallel(
        root,
        device_ids=devices,
        process_group=world.group,
        gradient_as_bucket_view=True,
        init_sync=not interruptible,
        **options,
    )
    time_buffers(module)
    return module


@final
class RepeatedPasses:
    """Undoes what a dropped pass changes in the values that a recipe keeps.

    Ranks that need equally many passes compute one without effect, DDP learns the order of gradients from one, and
    features are computed before the loss that computes them again. Other passes cost nothing.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._has_state = recipe, saves_state(recipe)

    @contextmanager
    def dropped(self, batch: MicroBatch) -> Iterator[None]:
        """Compute a pass of ``batch`` that is repeated in the same step."""
        start = deepcopy(self._recipe.state(batch.logical_rank)) if self._has_state else None
        try:
            yield
        finally:
            if self._has_state:
                self._recipe.load_state(batch.logical_rank, start)


def alone(recipe: Recipe, model: nn.Module, context: RunContext, reduce: Reduction = "flat") -> ModelReplica:
    """Return a replica that trains ``model``, on the device of ``context.world``, in this process alone."""
    if isinstance(recipe, MultiUpdateRecipe):
        reducer, states = update_reducer(reduce, model, None), MultiTrainState.of(recipe, model)
        return MultiUpdateReplica(recipe, context, train_state=states, reducer=reducer, sums_alone=True)
    sums = gradient_reducer(reduce, model, None)
    return SynchronousReplica(recipe, context, train_state=TrainState.of(recipe, model), reducer=sums, sums_alone=True)


def train_state_of(recipe: Recipe, model: nn.Module) -> TrainState | MultiTrainState:
    """Make the optimizers and schedules of ``recipe`` for ``model``."""
    if isinstance(recipe, MultiUpdateRecipe):
        return MultiTrainState.of(recipe, model)
    return TrainState.of(recipe, model)
