"""The replica for one process, or for ranks that all take the same optimizer step.

``RepeatedPasses`` lets a stateful recipe compute a micro-batch twice in a step, and undoes the discarded pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.utils import _verify_param_shape_across_processes
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from worldsize.collectives.per_rank import make_equal
from worldsize.collectives.step_timer import backward, measure_phase, time_buffers
from worldsize.core import (
    ConfigError,
    FeatureRecipe,
    Loss,
    MicroBatch,
    Recipe,
    Reduction,
    RunContext,
    StepResult,
    World,
    saves_state,
)
from worldsize.strategies.buffer_combinations import StepShape
from worldsize.strategies.chunk_tensor import ChunkLayout
from worldsize.strategies.chunk_trial import try_chunks
from worldsize.strategies.gathered_features import GatheredFeatures
from worldsize.strategies.gradient_audit import GradientAudit
from worldsize.strategies.gradient_reducer import GradientReducer, finds_unused
from worldsize.strategies.loss_record import LossRecord, step_metrics, trainable
from worldsize.strategies.model_replica import CallingRoot, ModelReplica
from worldsize.strategies.multi_update import MultiUpdateReplica
from worldsize.strategies.parameter_changes import ParameterChanges
from worldsize.strategies.reducers import gradient_reducer, update_reducer
from worldsize.strategies.train_state import TrainState


@final
class SynchronousReplica(ModelReplica):
    """Accumulates the gradients of all micro-batches, then takes one optimizer step.

    ``module``, such as DistributedDataParallel, computes the whole loss, which may use any part of the model.
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
        super().__init__(
            recipe,
            context,
            train_state=train_state,
            reducer=reducer,
            module=module,
            sums_alone=sums_alone,
            logical_ranks=logical_ranks,
            chunks=chunks,
        )
        self._parts, self.optimizer = list(train_state.parts.values()), train_state.optimizer
        self._passes = RepeatedPasses(recipe)
        self._untried_chunks = self.chunks  # until the first pass
        divides = reducer.divides_gradients
        self._changes = ParameterChanges(self.model, hooks=divides) if divides or self.world.size > 1 else None
        self._is_apart = False  # whether the current pass does not belong to the step
        self._audit: GradientAudit | None = None
        if context.integrity.audit and self._group is not None:
            self._audit = GradientAudit(
                context, self.model, self.dealing, self._run_apart, shares_weights=reducer.divides_gradients
            )
        self._features: GatheredFeatures | None = None
        if isinstance(recipe, FeatureRecipe) and context.logical_ranks > 1:
            self._features = GatheredFeatures(recipe, self.model, self.world.device, self._run_action)

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        if not all(isinstance(batch, MicroBatch) for batch in micro_batches):
            raise ConfigError("a step needs micro-batches with seeds. Pass the result of ws.micro_batches.")
        self._check_saves()
        if (flips := self._context.faults.flips) is not None:
            flips.flip("weight", dict(self.model.named_parameters()))
        try:
            losses, metrics = self._compute_gradient(micro_batches)
        except BaseException:  # the gang may heal and repeat the step
            self.reducer.undo()
            raise
        self.reducer.commit()
        lr: float | None = self.optimizer.param_groups[0].get("lr")
        with measure_phase("update"):
            norm, skipped, overflowed = self._step_optimizers(self._parts, self._parameters)
            self.scaler.update()
        if flips is not None:
            flips.flip("optimizer", self._list_optimizer_state())
        return StepResult(losses, lr, norm, skipped, metrics, overflowed=overflowed)

    def _compute_gradient(self, micro_batches: Sequence[MicroBatch]) -> tuple[Sequence[Tensor], Mapping[str, Tensor]]:
        """Compute the mean gradient into ``.grad``; return the losses and metrics of the step."""
        self.optimizer.zero_grad()
        try:
            with self._watch.watching(), self._hooks.suspend_hooks(), self._observe_passes(micro_batches[0].step):
                if self._features is not None:
                    shape = StepShape.from_group(self._group, self.dealing, len(micro_batches), self._logical_ranks)
                    with self._autocast():
                        self._features.gather_features(micro_batches, shape, self._passes.discard_pass)
                records = self._watch.run_reducer(partial(self.reducer.run, micro_batches, self._backward))
            self._watch.end_step()
        finally:  # also if DDP fails because a parameter was frozen
            if self._changes is not None:
                self._changes.check()
        self._context.faults.report_point("step:reduced")
        losses = self._weigh_gradients(self._parameters, records)
        self._hooks.run(self._parameters)
        metrics = step_metrics(records)
        self._context.before_update(losses, metrics)
        return losses, metrics

    def _list_optimizer_state(self) -> dict[str, Tensor]:
        """Return this process's tensors of the optimizer's state, by index and name."""
        states = self.optimizer.state.values()
        return {
            f"{place}.{name}": each
            for place, state in enumerate(states)
            for name, each in state.items()
            if isinstance(each, Tensor)
        }

    @contextmanager
    def _observe_passes(self, step: int) -> Iterator[None]:
        """Audit the passes in this block if ``step`` is audited, and flip bits of their gradients if configured."""
        audit, flips = self._audit if self._audit and self._audit.is_due(step) else None, self._context.faults.flips
        if flips is not None and not flips.plans("gradient"):
            flips = None

        def observe(name: str, gradient: Tensor) -> Tensor:
            if flips is not None and flips.plans("gradient"):
                gradient = gradient.clone()
                flips.flip("gradient", {name: gradient})
            return gradient if audit is None else audit.observe_gradient(name, gradient)

        if audit is None and flips is None:
            yield
            return
        with self.reducer.observe_gradients(observe), audit.audit_step(step) if audit else nullcontext():
            yield

    def _run_apart(self, batch: MicroBatch) -> Tensor:
        """Compute a pass apart from the step, for an audit; return its detached loss."""
        self._is_apart = True
        try:
            return self._watch.run_reducer(partial(self.reducer.run_apart, batch, self._backward)).loss
        finally:
            self._is_apart = False

    def _backward(self, batch: MicroBatch, scale: float) -> LossRecord:
        with self._passes.discard_pass(batch) if scale == 0 else nullcontext():
            record = self._run_pass(batch, scale)
        if self._audit is not None:
            self._audit.end_pass(batch, record.loss, is_discarded=scale == 0)
        return record

    def _run_pass(self, batch: MicroBatch, scale: float) -> LossRecord:
        if self._untried_chunks is not None:
            with self._passes.discard_pass(batch):
                try_chunks(self.recipe, [self.model], batch, self._untried_chunks, self._run_trial)
            self._untried_chunks = None
        self._context.faults.report_point("step:forward")
        self.streams.begin(batch.seed)
        flips = self._context.faults.flips
        if flips is not None:
            flips.flip("batch", {str(place): each for place, each in enumerate(tree_leaves(batch.data))})
        with flips.flipping_passes(self.model) if flips is not None else nullcontext():
            with self._autocast():
                compute = partial(self._compute_loss, batch)
                loss, record = compute() if self._module is None else self._module(compute)
            self._agreed.check_form(record)
            self._context.faults.report_point("step:backward")
            self._differentiate(self._scale_loss(loss, record, scale))
        self._context.faults.report_point("step:reduce")
        return record

    def _differentiate(self, scaled: Tensor) -> None:
        if self._is_apart and finds_unused(self._module):  # a backward pass would make DDP mark parameters as used
            trained = [parameter for parameter in self._parameters if parameter.requires_grad]
            torch.autograd.grad(scaled, trained, allow_unused=True)
        elif self._module is self._root:
            scaled.backward()  # type: ignore[no-untyped-call]
        else:
            backward(scaled)

    def _run_trial(self, batch: MicroBatch, _: bool) -> tuple[Loss, Mapping[str, Any]]:
        return (
            self._run_action(partial(self.recipe.micro_batch_loss, self.model, batch)),
            self._run_action(partial(self.recipe.evaluate, self.model, batch.data)),
        )

    def _compute_loss(self, batch: MicroBatch) -> tuple[Tensor, LossRecord]:
        """Return a micro-batch's scalar loss and its record, in a tuple so that DDP finds the loss."""
        if self._features is not None:
            return trainable(self._features.compute_loss(batch))
        if self.chunks is not None:
            return trainable(self.chunks.compute_loss(self.recipe, self.model, batch))
        return trainable(self.recipe.micro_batch_loss(self.model, batch))


def wrap_in_ddp(
    model: nn.Module, world: World, *, interruptible: bool = False, **options: Any
) -> DistributedDataParallel:
    """Wrap ``model`` so that its gradients are averaged over ``world.group`` during backward.

    The wrapper's forward pass calls a function without arguments, such as the loss of a micro-batch. The function may
    use any part of the model and any parameter.

    ``interruptible``: synchronize the initial weights with waits that end with the membership, unlike DDP's own.
    """
    devices = [world.device] if world.device.type == "cuda" else None
    root = CallingRoot(model)
    sparse = [name for name, buffer in root.named_buffers() if buffer.layout is not torch.strided]
    # sparse buffers cannot be broadcast; the recipe makes them equal on all ranks
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
    """Undoes the changes of a discarded pass to the state of a recipe.

    A pass is discarded if a rank needs an extra one to match the others, if DDP learns the order of gradients from it,
    or if it computes features that the loss computes again. Other passes have no overhead.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._has_state = recipe, saves_state(recipe)

    @contextmanager
    def discard_pass(self, batch: MicroBatch) -> Iterator[None]:
        """Restore the recipe's state after a pass of ``batch`` that is repeated in the same step."""
        start = deepcopy(self._recipe.state(batch.logical_rank)) if self._has_state else None
        try:
            yield
        finally:
            if self._has_state:
                self._recipe.load_state(batch.logical_rank, start)


def create_local_replica(
    recipe: Recipe, model: nn.Module, context: RunContext, reduce: Reduction = "flat"
) -> ModelReplica:
    """Return a replica that trains ``model`` on the device of ``context.world``, in one process."""
    is_multi = recipe.has_several_updates
    sums = update_reducer(reduce, model, None) if is_multi else gradient_reducer(reduce, model, None)
    kind = MultiUpdateReplica if is_multi else SynchronousReplica
    return kind(recipe, context, train_state=TrainState.from_recipe(recipe, model), reducer=sums, sums_alone=True)
