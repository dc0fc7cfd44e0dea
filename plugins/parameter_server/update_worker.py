"""A worker for recipes with several updates per step; workers compute each update together.

``UnitStart`` saves the state of its model that is not on any server, at the start of a unit.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from plugins.parameter_server.shard_link import DenseLinks, ShardLink
from plugins.parameter_server.sharding import ShardingPlan, parameters_by_optimizer
from plugins.parameter_server.task_loop import Task, TaskLoop, UnownedWeights, create_worker_watch, evaluate_part
from worldsize.collectives.ordered import PartialSums
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import ConfigError, Recipe, RunContext
from worldsize.net.registry import Dialer
from worldsize.optimizers.groups import get_trainable_parameters
from worldsize.strategies.gradient_reducer import Presence, pop_gradients
from worldsize.strategies.layer_streams import LayerStreams
from worldsize.strategies.loss_record import LossRecord
from worldsize.strategies.model_passes import prepare_passes
from worldsize.strategies.model_replica import ModelFlags, autocast
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.update_pass import UpdatePass

_Sums = Mapping[tuple[int, int], Sequence[Tensor | None]]  # gradients, by tree level and node


@final
class UpdateWorker:
    """A worker's part in one run with several updates per step, from the first task to the last.

    A unit of a step is a generator that pauses at each update until the leading server releases all workers.

    Args:
        recipe: The recipe to train.
        context: The context of the run: rank, data, numerics, and stop flag.
        dialer: Connects to the servers.
        plans: The assignment of parameters to servers, by optimizer name.
        train_state: The recipe's model on this process's device, and its optimizers, which never step here.
    """

    def __init__(
        self,
        recipe: Recipe,
        context: RunContext,
        dialer: Dialer,
        plans: Mapping[str, ShardingPlan],
        train_state: TrainState,
    ) -> None:
        self._recipe, self._context, self._dialer = recipe, context, dialer
        self._model, self._parts = train_state.model, train_state.parts
        prepare_passes(recipe, self._model, context.numerics, context.world.device)
        self._streams = LayerStreams(recipe, self._model, context.world.device, by_layer=False)
        self._parameters = parameters_by_optimizer(train_state)
        self._unowned = UnownedWeights(self._model)
        self._watch = create_worker_watch(self._model, context)
        self._dense = {
            name: DenseLinks(self._parameters[name], plan, first=context.world.rank, faults=context.faults)
            for name, plan in plans.items()
        }
        self._servers = len(next(iter(plans.values())).shards)
        self._pulled: dict[str, int] = {}  # number of updates included in the model's weights, by optimizer
        self._unit: Generator[dict[str, Any], None, None] | None = None

    def run(self, lease: float) -> None:
        """Work until the run ends. The leader retires workers after ``lease`` seconds of silence."""
        TaskLoop(
            self._dialer,
            self._context.stop,
            shards=self._servers * len(self._dense),
            connect=self._connect_shards,
            acts={"train": self._start_unit, "continue": self._continue, "evaluate": self._evaluate},
        ).run(lease)

    def _connect_shards(self, links: Sequence[ShardLink]) -> None:
        self._pulled.clear()
        for place, dense in enumerate(self._dense.values()):
            dense.replace_dense_links(links[place * self._servers : (place + 1) * self._servers])

    def _start_unit(self, task: Task) -> dict[str, Any]:
        """Start a unit, abandoning an unfinished one; return the TICK fields of its first update."""
        if self._unit is not None:
            self._unit.close()
        self._unit = self._run_unit(task)
        return next(self._unit)

    def _continue(self, _: Task) -> dict[str, Any]:
        self._context.faults.report_point("update:continue")
        assert self._unit is not None, "continued a step that was not started"
        return next(self._unit)

    def _evaluate(self, task: Task) -> dict[str, Any]:
        self._pulled.clear()
        for dense in self._dense.values():
            dense.pull_weights(0)
        return evaluate_part(self._recipe, self._model, self._context, task, self._streams)

    def _run_unit(self, task: Task) -> Generator[dict[str, Any], None, None]:
        """Compute a unit; yield the TICK fields of each update, and finally of the unit."""
        step, ranks, counts = task["step"], task["ranks"], dict(task["counts"])
        unit = {"unit_of": [step, ranks], "attempt": task["attempt"]}
        batches = [self._context.data.micro_batch(step, rank) for rank in ranks]
        options = self._copy_options()
        flags = ModelFlags(self._model)
        device, names = self._context.world.device, self._parts
        passes = [UpdatePass(self._recipe, each, names=names, device=device, flags=flags) for each in batches]
        with self._context.timing.measured(step), restore_on_abort(self._model, passes):
            for each, count in counts.items():
                self._pull_update(each, count)
            while True:
                records, arrivals = self._compute_update(passes, ranks)
                if not arrivals:
                    break
                for name, parts in arrivals.items():
                    counts[name] += 1
                    self._push_gradients(name, parts, count=counts[name])
                messages = [record.to_message() for record in records]
                with measure_phase("communication"):
                    yield {"update": list(arrivals), **unit, "records": messages}
                for name in arrivals:
                    self._pull_update(name, counts[name])
        self._watch.end_step()
        self._unowned.check_unchanged()
        if self._copy_options() != options:
            raise ConfigError(
                f"{type(self._recipe).__name__}.updates changed optimizer options, such as the learning rate, but "
                "servers apply the updates and do not receive such changes. Use schedules in the recipe, or "
                "strategy=ddp."
            )
        yield {"unit": [step, ranks], "records": [each.take_metrics().to_message() for each in passes]}

    def _compute_update(
        self, passes: Sequence[UpdatePass], ranks: Sequence[int]
    ) -> tuple[list[LossRecord], Mapping[str, _Sums]]:
        """Run all generators to the next update, and compute its gradient.

        Returns:
            The loss records, and the gradients by optimizer, empty if the generators have ended. The gradient of a
            parameter unused by all micro-batches is None.
        """
        total, records = self._context.logical_ranks, []
        arrivals: dict[str, tuple[PartialSums, Presence]] = {}
        for rank, current in zip(ranks, passes, strict=True):
            with autocast(self._context.world.device, self._context.numerics.precision), self._watch.watching():
                current.advance(lambda action: action())
            current.check_same(passes[0])
            if current.update:
                loss, record = current.take_loss()
                owned = [parameter for name in current.update for parameter in self._list_trained(name)]
                loss.backward(inputs=owned)  # type: ignore[no-untyped-call]
                records.append(record)
                for name in current.update:
                    parameters = list(self._parameters[name].values())
                    sums, presence = arrivals.setdefault(name, (PartialSums(total), Presence(parameters)))
                    presence.record_gradients()
                    sums.add(total, rank, pop_gradients(parameters))
        return records, {
            name: {node: presence.mask_absent(gradients) for node, gradients in sums.parts.items()}
            for name, (sums, presence) in arrivals.items()
        }

    def _list_trained(self, name: str) -> list[nn.Parameter]:
        """Return the parameters currently trained by optimizer ``name``; servers must own them all."""
        owned, trained = {id(each) for each in self._parameters[name].values()}, []
        for parameter in get_trainable_parameters(self._parts[name].optimizer):
            if parameter.numel() and id(parameter) not in owned:
                raise ConfigError(
                    f"{type(self._recipe).__name__} unfreezes a parameter of {name!r}, which was frozen at the start "
                    "of the run and is not on any server. Set requires_grad=True from the start, or use strategy=ddp."
                )
            trained.append(parameter)
        return trained

    def _push_gradients(
        self, name: str, arrivals: Mapping[tuple[int, int], Sequence[Tensor | None]], *, count: int
    ) -> None:
        """Push the gradient of update ``count``, and wait until all shards acknowledge it."""
        for (width, node), gradients in arrivals.items():
            named = dict(zip(self._parameters[name], gradients, strict=True))
            self._dense[name].push_buckets(named, step=count, width=width, node=node)
        self._dense[name].wait_for_all_pushes()

    def _pull_update(self, name: str, count: int) -> None:
        """Pull weights that include ``count`` updates, unless the model already has them.

        This invalidates autograd graphs that saved the old weights, which torch detects by their version.
        """
        if self._pulled.get(name) != count:
            self._dense[name].pull_weights(count)
            self._pulled[name] = count
            torch.autograd.graph.increment_version(tuple(self._parameters[name].values()))

    def _copy_options(self) -> list[dict[str, Any]]:
        """Return a copy of all optimizers' options, such as learning rates."""
        groups = [group for part in self._parts.values() for group in part.optimizer.param_groups]
        return [{key: _convert_to_plain(value) for key, value in group.items() if key != "params"} for group in groups]


@contextmanager
def restore_on_abort(model: nn.Module, passes: Sequence[UpdatePass]) -> Iterator[None]:
    """Close the passes and restore the model, if the step is abandoned."""
    start = UnitStart(model)
    try:
        yield
    except GeneratorExit:  # the step is abandoned
        for each in passes:
            each.close()
        start.restore()
        raise


def _convert_to_plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


@final
class UnitStart:
    """A copy of the training flags and non-persistent buffers of ``model``, restored if a unit is abandoned."""

    def __init__(self, model: nn.Module) -> None:
        self._flags = ModelFlags(model)
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name in sorted(module._non_persistent_buffers_set)
            if (buffer := module._buffers[name]) is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied flags and buffers."""
        self._flags.restore()
        for module, name, buffer, values in self._buffers:
            module._buffers[name] = buffer.copy_(values)
