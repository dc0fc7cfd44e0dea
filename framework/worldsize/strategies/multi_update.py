"""The replica for a recipe with several updates per step, which are the same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.collectives.ordered import summation_tree
from worldsize.collectives.per_rank import make_equal
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import ConfigError, MicroBatch, Recipe, Reduction, RunContext, StepResult
from worldsize.optimizers.groups import get_trainable_parameters
from worldsize.strategies.gradient_reducer import GradientReducer, Presence, PresenceExchange
from worldsize.strategies.loss_record import LossRecord, step_metrics
from worldsize.strategies.model_replica import CallingRoot, ModelFlags, ModelReplica
from worldsize.strategies.reducers import BUCKET_MB, update_reducer
from worldsize.strategies.step_buffers import BufferMean
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.update_pass import UpdatePass


@final
class MultiUpdateReplica(ModelReplica):
    """Runs the recipe's generators, one per micro-batch, in lockstep from update to update.

    At each update, every micro-batch runs forward to its next ``yield``, then backward, in the order of ``reducer``.
    Then the optimizers of this update take a step; only their parameters have gradients. Buffers, such as BatchNorm's
    statistics, are averaged over logical ranks after each update.
    """

    def __init__(
        self,
        recipe: Recipe,
        context: RunContext,
        *,
        train_state: TrainState,
        reducer: GradientReducer,
        module: CallingRoot | None = None,
        sums_alone: bool = False,
    ) -> None:
        super().__init__(
            recipe, context, train_state=train_state, reducer=reducer, module=module, sums_alone=sums_alone
        )
        self._parts = train_state.parts
        self._size = 1 if self._group is None else self.world.size
        self._buffers = BufferMean(self.model, self._group, self.dealing)
        self._exchange = PresenceExchange(self._group, self.world.device) if self._group and module is None else None
        self._stepped_names: set[str] = set()  # optimizers that have stepped since the last update of the loss scale

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        self._check_saves()
        rates = {name: first_rate(part.optimizer) for name, part in self._parts.items()}
        flags = ModelFlags(self.model)
        device, names = self.world.device, self._parts
        passes = [UpdatePass(self.recipe, each, names=names, device=device, flags=flags) for each in micro_batches]
        results: list[UpdateResult] = []
        with self.reducer.begin_updates():
            while (result := self._run_update(passes, micro_batches)) is not None:
                results.append(result)
        self._watch.end_step()
        self._update_scale()
        returned = step_metrics([each.take_metrics() for each in passes])
        return step_result(results, rates, returned, kind=type(self.recipe).__name__, step=micro_batches[0].step)

    def _run_update(self, passes: Sequence[UpdatePass], batches: Sequence[MicroBatch]) -> UpdateResult | None:
        """Run the next update of the step; return its result, or None if the step has ended."""
        buffers = self._buffers.begin_step(len(batches))
        first, *others = self._order_batches(len(batches))
        self._advance_pass(passes[first])  # the first pass in summation order determines the update
        if self._group is not None and self.world.device.type == "cpu":  # on a GPU, this would wait for the device
            rates = {name: _group_rates(part.optimizer) for name, part in self._parts.items()}
            passes[first].check_same_on(self.world, rates)
        names = passes[first].update
        if not names:
            buffers.add(first)
            for place in others:
                self._advance_pass(passes[place], same_as=passes[first])
                buffers.add(place)
            buffers.finish_step()
            return None
        if self._stepped_names.intersection(names):  # GradScaler allows one step per optimizer between its updates
            self._update_scale()
        self._stepped_names.update(names)
        parameters = [
            parameter for name in names for parameter in get_trainable_parameters(self._parts[name].optimizer)
        ]
        fills = len(batches) * self._size > 1  # all must sum the same parameters, whether their losses use them or not
        places = {id(batch): place for place, batch in enumerate(batches)}
        presence = Presence(parameters)

        def backward(batch: MicroBatch, scale: float) -> LossRecord:
            place = places[id(batch)]
            if place != first:
                self._advance_pass(passes[place], same_as=passes[first])
            for index in presence.absent:
                parameters[index].grad = None  # zeros of an earlier micro-batch
            record = self._backward(passes[place], parameters, scale)
            presence.record_gradients()
            if fills and self._root is None:
                _fill_missing_gradients(parameters)
            buffers.add(place)
            return record

        for parameter in self._parameters:
            parameter.grad = None
        with self._hooks.suspend_hooks():
            records = self.reducer.run(batches, backward)
        self._context.faults.report_point("step:reduced")
        if fills and self._root is None:
            self._remove_absent(parameters, presence)
        buffers.finish_step()
        return self._apply_update(names, parameters, records)

    def _remove_absent(self, parameters: Sequence[nn.Parameter], presence: Presence) -> None:
        """Remove zero gradients that fill in for gradients missing on all ranks."""
        present: Sequence[bool] = [index not in presence.absent for index in range(len(parameters))]
        if self._exchange is not None:
            present = self._exchange.present_anywhere(present)
        for parameter, is_present in zip(parameters, present, strict=True):
            if not is_present:
                parameter.grad = None

    def _order_batches(self, batches: int) -> list[int]:
        """Return the indices of the micro-batches in summation-tree order."""
        tree = summation_tree(batches, self._size, self.dealing)
        return [leaf for node in range(tree.local_nodes) for leaf in tree.list_leaves(node)]

    def _advance_pass(self, current: UpdatePass, same_as: UpdatePass | None = None) -> None:
        self._context.faults.report_point("step:forward")
        with self._autocast(), self._watch.watching():
            current.advance(self._run_action)
        if same_as is not None:
            current.check_same(same_as)

    def _backward(self, current: UpdatePass, parameters: Sequence[nn.Parameter], scale: float) -> LossRecord:
        """Add the gradient of the update's loss to ``.grad``; return the record of the loss."""
        self._context.faults.report_point("step:backward")
        loss, record = current.take_loss()
        scaled = self._scale_loss(loss, record, scale)
        if self._root is None:
            scaled.backward(inputs=list(parameters))  # type: ignore[no-untyped-call]
        else:
            scaled.backward()  # type: ignore[no-untyped-call]
        return record

    def _apply_update(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], records: Sequence[LossRecord]
    ) -> UpdateResult:
        """Weigh and clip the gradient, and step the optimizers and schedules."""
        losses = self._weigh_gradients(parameters, records, names)
        self._hooks.run(parameters)
        with measure_phase("update"):
            norm, skipped, overflowed = self._step_optimizers([self._parts[name] for name in names], parameters)
        return UpdateResult(names, losses, norm, skipped, step_metrics(records), overflowed)

    def _update_scale(self) -> None:
        """Update the loss scale if an optimizer has stepped since the last update."""
        if self._stepped_names:
            self.scaler.update()
            self._stepped_names.clear()


def _group_rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if group.get("lr") is not None]


def refuse_healing_updates(recipe: Recipe) -> None:
    """Raise ConfigError if ``recipe`` takes several updates per step, which cannot heal."""
    if recipe.has_several_updates:
        raise ConfigError(
            f"strategy.on_failure=heal is not supported with several updates per step ({type(recipe).__name__}): a "
            "failure could leave a step with only some of them. Set strategy.on_failure=restart."
        )


def whole_multi_update(
    recipe: Recipe,
    context: RunContext,
    train_state: TrainState,
    reduce: Reduction = "flat",
    bucket_mb: float = BUCKET_MB,
) -> MultiUpdateReplica:
    """Return a replica of an unsharded model on ``context.world``, with rank 0's weights.

    ``bucket_mb``: size of gradient buckets in MiB.
    """
    model, group = train_state.model, context.world.group
    make_equal(model, group)
    reducer = update_reducer(reduce, model, group, bucket_mb=bucket_mb)
    return MultiUpdateReplica(recipe, context, train_state=train_state, reducer=reducer)


def _fill_missing_gradients(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


@final
@dataclass(frozen=True)
class UpdateResult:
    """The result of one update in this process; see :class:`StepResult` for a step."""

    names: Sequence[str]  # of the optimizers that stepped
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
        rates: Learning rate of each optimizer at the start of the step, in the recipe's order.
        returned: Metrics that the generators returned at the end, each float64 (micro-batches, 2).
        kind: Name of the recipe's class.
        step: Number of the step.

    Raises:
        ConfigError: there were no updates, or a metric has a reserved name.
    """
    if not results:
        raise ConfigError(f"{kind}.updates yielded nothing in step {step}. Yield an update in every step.")
    skips = [result.skipped for result in results]
    norms = [result.grad_norm for result in results if result.grad_norm is not None]
    return StepResult(
        losses=_sum_losses([result.losses for result in results]),
        lr=next(iter(rates.values())),
        grad_norm=torch.linalg.vector_norm(torch.stack(norms)) if norms else None,
        skipped=any(skips),
        metrics=_combine_metrics(results, rates, returned),
        partly=any(skips) and not all(skips),
        occasional=True,
        overflowed=any(result.overflowed for result in results),
    )


def first_rate(optimizer: Optimizer) -> float | None:
    """Return the learning rate of an optimizer's first group, or None if it has none."""
    rate: float | None = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def _sum_losses(losses: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the sum of each micro-batch's losses over the updates.

    Sums are in float64, the dtype of losses received from other processes, so that all processes compute equal sums.
    """
    return [torch.stack([loss.double() for loss in own]).sum() for own in zip(*losses, strict=True)]


def _combine_metrics(
    results: Sequence[UpdateResult], rates: Mapping[str, float | None], returned: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a step's metrics, losses per optimizer, and all learning rates but the first.

    Optimizers that did not step have a count of 0, so that all steps have the same metric names.
    """
    metrics: dict[str, Tensor] = {}
    for own_metrics in [*(result.metrics for result in results), returned]:
        for name, pairs_b2 in own_metrics.items():
            metrics[name] = metrics[name] + pairs_b2 if name in metrics else pairs_b2
    for name in rates:
        if metrics.keys() & {f"loss/{name}", f"lr/{name}"}:
            raise ConfigError(
                f"the metric names loss/{name} and lr/{name} are reserved for the optimizer {name!r}. Rename the "
                "metric in Recipe.updates."
            )
    losses = results[0].losses
    one_b = torch.ones(len(losses), dtype=torch.float64, device=losses[0].device)
    for place, (name, rate) in enumerate(rates.items()):
        own = [result.losses for result in results if name in result.names]
        total_b = torch.stack(_sum_losses(own)) if own else one_b * 0
        metrics[f"loss/{name}"] = torch.stack([total_b, one_b * len(own)], dim=1)
        if place and rate is not None:
            metrics[f"lr/{name}"] = torch.stack([one_b * rate, one_b], dim=1)
    return metrics
