"""The replica that trains a recipe with several updates a step, in which all ranks take the same ones.

The results of the updates are combined into the result of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.collectives.ordered import summation_tree
from worldsize.collectives.per_rank import make_equal
from worldsize.collectives.step_timer import phase
from worldsize.core import ConfigError, MicroBatch, MultiUpdateRecipe, Recipe, Reduction, RunContext, StepResult
from worldsize.strategies.gradient_reducer import GradientReducer, Presence, PresenceExchange
from worldsize.strategies.loss_record import LossRecord, step_metrics
from worldsize.strategies.model_replica import ModelFlags, ModelReplica
from worldsize.strategies.multi_train_state import MultiTrainState, parameters_of
from worldsize.strategies.parameter_changes import GradientHooks
from worldsize.strategies.reducers import BUCKET_MB, update_reducer
from worldsize.strategies.step_buffers import BufferMean
from worldsize.strategies.update_pass import UpdatePass


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
            present = self._exchange.present_anywhere(present)
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


@final
@dataclass(frozen=True)
class UpdateResult:
    """The result of one update in this process; :class:`StepResult` is that of a step."""

    names: Sequence[str]  # of the optimizers that took it
    losses: Sequence[Tensor]
    grad_norm: Tensor | None
    skipped: bool
    metrics: Mapping[str, Tensor]
    overflowed: bool = False


def step_result(
    results: Sequence[UpdateResult],
    rates: Mapping[str, float | None],
    returned: Mapping[str, Tensor],
    *,
    kind: str,
    step: int,
) -> StepResult:
    """Combine the results of a step's updates.

    Args:
        results: Results of the updates, in order.
        rates: The learning rate of each optimizer when the step began, in the recipe's order.
        returned: Metrics that the generators returned at their ends, float64 (micro-batches, 2) each.
        kind: Name of the recipe's class.
        step: Number of the step.

    Raises:
        ConfigError: there was no update, or a metric's name is taken.
    """
    if not results:
        raise ConfigError(f"{kind}.updates yielded nothing in step {step}. Yield an update in every step.")
    skips = [result.skipped for result in results]
    norms = [result.grad_norm for result in results if result.grad_norm is not None]
    return StepResult(
        losses=_sums([result.losses for result in results]),
        lr=next(iter(rates.values())),
        grad_norm=torch.linalg.vector_norm(torch.stack(norms)) if norms else None,
        skipped=any(skips),
        metrics=_metrics(results, rates, returned),
        partly=any(skips) and not all(skips),
        occasional=True,
        overflowed=any(result.overflowed for result in results),
    )


def first_rate(optimizer: Optimizer) -> float | None:
    """Return the learning rate of an optimizer's first group; None if it has none."""
    rate: float | None = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def _sums(losses: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return, for each micro-batch, the sum of its losses in the updates.

    It is summed in float64, the dtype of losses from other processes, so that the sum is the same on all of them.
    """
    return [torch.stack([loss.double() for loss in own]).sum() for own in zip(*losses, strict=True)]


def _metrics(
    results: Sequence[UpdateResult], rates: Mapping[str, float | None], returned: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the metrics of updates and generators, each optimizer's mean loss, and all learning rates but the first.

    The counts of an optimizer that did not step are 0, so that all steps have the same names.
    """
    metrics: dict[str, Tensor] = {}
    for own_metrics in [*(result.metrics for result in results), returned]:
        for name, pairs_b2 in own_metrics.items():
            metrics[name] = metrics[name] + pairs_b2 if name in metrics else pairs_b2
    for name in rates:
        if metrics.keys() & {f"loss/{name}", f"lr/{name}"}:
            raise ConfigError(
                f"the recipe's updates name a metric loss/{name} or lr/{name}, which each logged step has of the "
                f"optimizer {name!r}. Rename it."
            )
    losses = results[0].losses
    one_b = torch.ones(len(losses), dtype=torch.float64, device=losses[0].device)
    for place, (name, rate) in enumerate(rates.items()):
        own = [result.losses for result in results if name in result.names]
        total_b = torch.stack(_sums(own)) if own else one_b * 0
        metrics[f"loss/{name}"] = torch.stack([total_b, one_b * len(own)], dim=1)
        if place and rate is not None:
            metrics[f"lr/{name}"] = torch.stack([one_b * rate, one_b], dim=1)
    return metrics
