"""Base classes for strategies with independent workers that synchronize periodically.

A strategy derives from ``PeriodicSyncStrategy`` and creates an ``OuterOptimizer``, which is called after every step
and decides when workers exchange which tensors. ``Rounds`` schedules the exchange of fragments: all at once, or one
after another in the background. Fragments consist of parameters, and of buffers that can be averaged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worldsize.collectives.cluster_cost import all_reduce_seconds, estimate_leaving_bytes, ring_share, whole_bytes
from worldsize.collectives.per_rank import local_row, make_equal, stack_per_rank
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import (
    Cluster,
    ConfigError,
    Cost,
    EvaluationBatch,
    MicroBatch,
    Range,
    Recipe,
    Replica,
    Role,
    RunContext,
    StateDict,
    StepResult,
    Strategy,
    Workload,
    World,
)
from worldsize.strategies.declared_buffers import declare_buffers
from worldsize.strategies.model_replica import ModelReplica
from worldsize.strategies.periodic_exchange import Exact, Fragment, average_tree
from worldsize.strategies.synchronous import create_local_replica
from worldsize.strategies.train_state import TrainState
from worldsize.strategies.wrapping import refuse_complex

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True)
class PeriodicSyncStrategy(Strategy):
    """Abstract base: each worker takes ``inner_steps`` optimizer steps between exchanges."""

    supports = frozenset({"state_metrics", "loss_scale", "multi_update", "compile", "activation_checkpointing"})

    inner_steps: Annotated[int, Range(least=1)] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduce == "ordered":
            raise ConfigError(
                "reproducibility=elastic (strategy.reduce=ordered) is not supported with periodic synchronization: "
                "the result depends on the number of workers. Set reproducibility=deterministic, which gives bitwise "
                "identical results at the same world size."
            )
        if self.reduce != "flat":
            raise ConfigError(
                f"strategy.reduce={self.reduce} is not supported with periodic synchronization: workers do not "
                "exchange gradients. Set strategy.reduce=flat."
            )

    def check_built(self, recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
        declare_buffers(recipe, model, trains_apart=True)
        refuse_complex(model, because="this strategy exchanges only real numbers")

    def roles(self, cluster: Cluster) -> Mapping[str, Role]:
        return {"worker": Role(processes=cluster.processes)}

    def update_parts(self, cluster: Cluster, logical_ranks: int) -> int:
        return self.data_parallel(cluster)

    @property
    def schedules_by_metric(self) -> bool:
        return True

    def replica(self, recipe: Recipe, context: RunContext) -> Replica:
        world = context.world
        model = recipe.model().to(world.device)
        # an outer gradient is meaningless if workers start at different points
        make_equal(model, world.group)
        inner = create_local_replica(recipe, model, context)
        return PeriodicSyncReplica(inner, world, self.outer(recipe, inner.train_state, world))

    @abstractmethod
    def outer(self, recipe: Recipe, train_state: TrainState, world: World) -> OuterOptimizer:
        """Create the outer optimizer that synchronizes ``train_state`` with the other workers."""


class OuterOptimizer(ABC):
    """Abstract base: synchronizes independent workers, and is called after every step."""

    sent_bytes: int = 0
    """Bytes sent per worker in exchanges since the run began."""

    @abstractmethod
    def run_due_exchanges(self, step: int) -> None:
        """Run the exchanges that are due after step ``step`` of this worker, counted from 1."""

    def restart(self) -> None:  # noqa: B027 - some are stateless
        """Restart from the current model, just loaded and equal on all workers."""

    def state(self) -> StateDict:
        """Return the state that persists between exchanges; it is equal on all workers."""
        return {}

    def load(self, state: StateDict) -> None:  # noqa: B027 - some are stateless
        """Load what :meth:`state` returned."""


@final
class PeriodicSyncReplica(Replica):
    """Trains ``inner`` independently, and synchronizes it with other workers through ``outer``.

    The saved model and optimizer are means over workers; any other strategy can resume from them. The entry
    ``strategy`` also has each worker's own state, so that the same strategy resumes bit for bit.
    """

    def __init__(self, inner: ModelReplica, world: World, outer: OuterOptimizer) -> None:
        self._inner, self._world, self._outer = inner, world, outer
        self._exact = Exact(world)
        self._taken = 0  # steps since the start, or since resuming without worker states

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        result = self._inner.step(micro_batches)
        self._taken += 1
        with measure_phase("update"):
            self._outer.run_due_exchanges(self._taken)
        return result

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        """Evaluate the mean model, so that the assignment of batches to workers does not matter."""
        with self._mean_model():
            return self._inner.evaluate(batches)

    @contextmanager
    def _mean_model(self) -> Iterator[None]:
        now = self._inner.model.state_dict()
        kept = {name: tensor.clone() for name, tensor in now.items()}
        _copy_tensors(now, average_tree(now, self._exact))
        yield
        _copy_tensors(now, kept)

    def advance_schedules(self, value: float, *, step: int) -> None:
        self._inner.advance_schedules(value, step=step)

    def state(self) -> StateDict:
        alone = self._inner.state()
        mine = {"model": alone["model"], "optimizer": alone["optimizer"]["state"]}
        mean, scaler = average_tree(mine, self._exact), _extract_figures(alone["scaler"])
        common = {"taken": self._taken, "sent_bytes": self._outer.sent_bytes, "outer": self._outer.state()}
        return {
            **alone,
            "model": mean["model"],
            "optimizer": {**alone["optimizer"], "state": mean["optimizer"]},
            "scaler": _merge_figures(alone["scaler"], self._broadcast_figures(scaler)),
            "strategy": {**common, "workers": stack_per_rank({**mine, "scaler": scaler}, self._world)},
        }

    def _broadcast_figures(self, figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Broadcast ``figures`` from worker 0, and return them."""
        sent = {name: figure.to(self._world.device, copy=True) for name, figure in figures.items()}
        if self._world.group is not None:
            for figure in sent.values():
                dist.broadcast(figure, group=self._world.group, group_src=0)
        return sent

    def load(self, state: StateDict) -> None:
        kept = state["strategy"]
        self._taken, self._outer.sent_bytes = kept["taken"], kept["sent_bytes"]
        if self._taken == 0:  # saved by a different strategy or with a different number of workers
            self._inner.load(state)
            self._outer.restart()
            return
        mine = local_row(kept["workers"])
        alone = {"model": mine["model"], "optimizer": {**state["optimizer"], "state": mine["optimizer"]}}
        self._inner.load({**state, **alone, "scaler": _merge_figures(state["scaler"], mine["scaler"])})
        self._outer.load(kept["outer"])

    def facts(self) -> Mapping[str, Any]:
        """Return the bytes sent per worker since the start, excluding evaluation and checkpoints."""
        return {**self._inner.facts(), "sent_bytes": self._outer.sent_bytes}


_MOVING = ("scale", "_growth_tracker")  # entries of a gradient scaler's state that change


def _extract_figures(scaler: StateDict) -> dict[str, Tensor]:
    return {name: torch.tensor(scaler[name]) for name in _MOVING if name in scaler}


def _merge_figures(scaler: StateDict, figures: Mapping[str, Tensor]) -> StateDict:
    return {**scaler, **{name: figure.item() for name, figure in figures.items()}}


def _copy_tensors(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])


# learning rate of the outer optimizer, Nesterov SGD
OuterRate = Annotated[float, Range(above=0, hint="typically 0.7, or 1 without momentum to average the weights")]
OuterMomentum = Annotated[float, Range(least=0, below=1, hint="typically 0.9")]


@final
class Rounds(OuterOptimizer):
    """Exchanges fragments in turn, each once every ``inner_steps`` steps.

    Fragment i is sent after the steps ``offsets[i] + n × inner_steps``, and its mean is applied ``delay`` steps later,
    with weight ``mix`` for the worker's own values. The second half of the exchange starts after half of the delay.
    """

    def __init__(
        self,
        fragments: Sequence[Fragment],
        offsets: Sequence[int],
        *,
        inner_steps: int,
        delay: int = 0,
        mix: float = 0.0,
    ) -> None:
        self._fragments, self._offsets = list(fragments), list(offsets)
        self._inner_steps, self._delay, self._mix = inner_steps, delay, mix

    def run_due_exchanges(self, step: int) -> None:
        for fragment in self._find_due_fragments(step):
            self.sent_bytes += fragment.send()
        for fragment in self._find_due_fragments(step - -(-self._delay // 2)):
            fragment.relay_exchange()
        for fragment in self._find_due_fragments(step - self._delay):
            fragment.apply_mean(self._mix)

    def _find_due_fragments(self, step: int) -> list[Fragment]:
        """Return the fragments to send after ``step``."""
        pairs = zip(self._fragments, self._offsets, strict=True)
        return [fragment for fragment, offset in pairs if (step - offset) % self._inner_steps == 0]

    def restart(self) -> None:
        for fragment in self._fragments:
            fragment.restart()

    def state(self) -> StateDict:
        return {"fragments": [fragment.state(in_flight=self._delay > 0) for fragment in self._fragments]}

    def load(self, state: StateDict) -> None:
        for fragment, kept in zip(self._fragments, state["fragments"], strict=True):
            fragment.load(kept)


def find_trained_parameters(model: nn.Module) -> list[Tensor]:
    """Return the trainable parameters of ``model``."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def frozen_parameters(model: nn.Module) -> list[Tensor]:
    """Return the frozen parameters; a recipe may still change them, such as averaged copies."""
    return [parameter for parameter in model.parameters() if not parameter.requires_grad]


def find_averaged_buffers(model: nn.Module) -> list[Tensor]:
    """Return the saved floating-point buffers, such as BatchNorm's statistics."""
    kept = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in kept and buffer.is_floating_point()]


def averaging_cost(work: Workload, cluster: Cluster, *, every: int) -> Cost:
    """Return the cost per step of all-reducing parameters every ``every`` steps, not overlapped."""
    sent = 2 * ring_share(cluster.processes) * work.parameter_bytes / every
    seconds = all_reduce_seconds(work.parameter_bytes, cluster) / every
    return Cost(
        whole_bytes(work), sent, estimate_leaving_bytes(cluster, sent), seconds, exposed_seconds=seconds, same=False
    )
