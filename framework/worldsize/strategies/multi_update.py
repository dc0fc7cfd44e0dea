"""The replica that trains a recipe with several updates a step, in which all ranks take the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from worldsize.core import ConfigError, MicroBatch, MultiUpdateRecipe, Recipe, Reduction, RunContext, StepResult
from worldsize.dist.broadcast import make_equal
from worldsize.dist.ordered import summation_tree
from worldsize.dist.step_timer import phase
from worldsize.strategies.gradient_hooks import GradientHooks
from worldsize.strategies.gradient_reducer import GradientReducer
from worldsize.strategies.loss_record import LossRecord, step_metrics
from worldsize.strategies.model_flags import ModelFlags
from worldsize.strategies.model_replica import ModelReplica
from worldsize.strategies.multi_train_state import MultiTrainState, parameters_of
from worldsize.strategies.presence import Presence, PresenceExchange
from worldsize.strategies.step_buffers import BufferMean
from worldsize.strategies.update_pass import UpdatePass
from worldsize.strategies.update_reducers import BUCKET_MB, update_reducer
from worldsize.strategies.update_results import UpdateResult, first_rate, step_result


@final
class MultiUpdateReplica(ModelReplica):
    """Runs the recipe's generators, one for each micro-batch, in lockstep from update to update.

    At each update, every micro-batch runs forward to its next ``yield`` and backward, in the order of ``reducer``; then
    its optimizers step. Only their parameters have gradients. Buffers, such as BatchNorm's statistics, are averaged
    over logical ranks after each update.

    If the model is sharded, ``root`` is the module around it, which calls a function inside its own hooks.
    """

    def __init__(
        self,
        recipe: MultiUpdateRecipe,
        context: RunContext,
        *,
        train_state: MultiTrainState,
        reducer: GradientReducer,
        root: nn.Module | None = None,
        sums_alone: bool = False,
    ) -> None:
        super().__init__(recipe, context, train_state=train_state, reducer=reducer, sums_alone=sums_alone)
        self._updates, self._parts, self._root = recipe.micro_batch_updates, train_state.parts, root
        self._parameters = list(self.model.parameters())
        self._hooks = GradientHooks(self._parameters)
        self._size = 1 if self._group is None else self.world.size
        if root is not None:
            self._watch.include(root)
        self._buffers = BufferMean(self.model, self._group, self.dealing)
        self._exchange = PresenceExchange(self._group, self.world.device) if self._group and root is None else None
        self._stepped_names: set[str] = set()  # of optimizers that have stepped since the loss scale was updated

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self._check_saves()
        rates = {name: first_rate(part.optimizer) for name, part in self._parts.items()}
        flags = ModelFlags(self.model)
        passes = [self._begun(batch, flags) for batch in micro_batches]
        results: list[UpdateResult] = []
        with self.reducer.updates():
            while (result := self._update(passes, micro_batches)) is not None:
                results.append(result)
        self._watch.end_step()
        self._update_scale()
        returned = step_metrics([each.take_metrics() for each in passes])
        return step_result(results, rates, returned, kind=type(self.recipe).__name__, step=micro_batches[0].step)

    def _begun(self, batch: MicroBatch, flags: ModelFlags) -> UpdatePass:
        kind, device = type(self.recipe).__name__, self.world.device
        begin = partial(self._updates, self.model, batch)
        return UpdatePass(kind, begin, batch, names=self._parts, device=device, flags=flags)

    def _update(self, passes: Sequence[UpdatePass], batches: Sequence[MicroBatch]) -> UpdateResult | None:
        """Run the next update of the step; return None if there is none."""
        buffers = self._buffers.begin(len(batches))
        first, *others = self._order(len(batches))
        self._advance(passes[first])  # the first in every order of sums: it says which update this is
        if self._group is not None and self.world.device.type == "cpu":  # on a GPU it would wait for the device
            rates = {name: _group_rates(part.optimizer) for name, part in self._parts.items()}
            passes[first].check_same_on(self.world, rates)
        names = passes[first].update
        if not names:
            buffers.add(first)
            for place in others:
                self._advance(passes[place], same_as=passes[first])
                buffers.add(place)
            buffers.finish()
            return None
        if self._stepped_names.intersection(names):  # GradScaler lets an optimizer step once between its own updates
            self._update_scale()
        self._stepped_names.update(names)
        parameters = [parameter for name in names for parameter in parameters_of(self._parts[name].optimizer)]
        fills = len(batches) * self._size > 1  # all have to sum the same, whether their losses depend on it or not
        places = {id(batch): place for place, batch in enumerate(batches)}
        presence = Presence(parameters)

        def backward(batch: MicroBatch, scale: float) -> LossRecord:
            place = places[id(batch)]
            if place != first:
                self._advance(passes[place], same_as=passes[first])
            for index in presence.absent:
                parameters[index].grad = None  # zeros of an earlier micro-batch
            record = self._backward(passes[place], parameters, scale)
            presence.note()
            if fills and self._root is None:
                _fill(parameters)
            buffers.add(place)
            return record

        for parameter in self._parameters:
            parameter.grad = None
        with self._hooks.suspended():
            records = self.reducer.run(batches, backward)
        self._context.faults.at("step:reduced")
        if fills and self._root is None:
            self._remove_absent(parameters, presence)
        buffers.finish()
        return self._applied(names, parameters, records)

    def _remove_absent(self, parameters: Sequence[nn.Parameter], presence: Presence) -> None:
        """Remove the zeros that stand for gradients that no rank has."""
        present: Sequence[bool] = [index not in presence.absent for index in range(len(parameters))]
        if self._exchange is not None:
            present = self._exchange.any(present)
        for parameter, is_present in zip(parameters, present, strict=True):
            if not is_present:
                parameter.grad = None

    def _order(self, batches: int) -> list[int]:
        """Return the indices of the micro-batches in the order of the summation tree."""
        tree = summation_tree(batches, self._size, self.dealing)
        return [leaf for node in range(tree.local_nodes) for leaf in tree.leaves(node)]

    def _advance(self, current: UpdatePass, same_as: UpdatePass | None = None) -> None:
        self._context.faults.at("step:forward")
        with self._autocast(), self._watch.watching():
            current.advance(self._call)
        if same_as is not None:
            current.check_same(same_as)

    def _call(self, action: Callable[[], Any]) -> Any:
        return action() if self._root is None else self._root(action)

    def _backward(self, current: UpdatePass, parameters: Sequence[nn.Parameter], scale: float) -> LossRecord:
        """Add the gradient of the update's loss to ``.grad`` of its parameters; return the record of the loss."""
        self._context.faults.at("step:backward")
        loss, record = current.take_loss()
        scaled = self._scaled(loss, record, scale)
        if self._root is None:
            scaled.backward(inputs=list(parameters))  # type: ignore[no-untyped-call]
        else:
            scaled.backward()  # type: ignore[no-untyped-call]
        return record

    def _applied(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], records: Sequence[LossRecord]
    ) -> UpdateResult:
        """Weigh and clip the gradient, and let the optimizers and their schedules step."""
        losses = self._weighed(parameters, records, names)
        self._hooks.run(parameters)
        with phase("update"):
            norm, skipped, overflowed = self._stepped([self._parts[name] for name in names], parameters)
        return UpdateResult(names, losses, norm, skipped, step_metrics(records), overflowed)

    def _update_scale(self) -> None:
        """Increase the loss scale, or decrease it if a gradient was not finite, as torch.amp.GradScaler does."""
        if self._stepped_names:
            self.scaler.update()
            self._stepped_names.clear()


def _group_rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]


def refuse_healing_updates(recipe: Recipe) -> None:
    """Raise ConfigError if ``recipe`` takes several updates a step and its gang is to heal."""
    if isinstance(recipe, MultiUpdateRecipe):
        raise ConfigError(
            f"{type(recipe).__name__} takes several updates a step, of which a failure would leave some done. "
            "Set strategy.on_failure=restart."
        )


def whole_multi_update(
    recipe: MultiUpdateRecipe,
    context: RunContext,
    train_state: MultiTrainState,
    reduce: Reduction = "flat",
    bucket_mb: float = BUCKET_MB,
) -> MultiUpdateReplica:
    """Return a replica of a model that every rank of ``context.world`` holds whole, with the weights of rank 0.

    ``bucket_mb`` is the size in MiB of the buckets in which gradients are summed.
    """
    model, group = train_state.model, context.world.group
    make_equal(model, group)
    reducer = update_reducer(reduce, model, group, bucket_mb=bucket_mb)
    return MultiUpdateReplica(recipe, context, train_state=train_state, reducer=reducer)


def _fill(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
