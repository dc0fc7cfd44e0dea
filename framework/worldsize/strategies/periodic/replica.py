"""A worker that trains independently and synchronizes with the others periodically."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from worldsize.core import EvaluationBatch, MicroBatch, Replica, StateDict, StepResult, World
from worldsize.dist.per_rank import local_row, stack_per_rank
from worldsize.dist.step_timer import phase
from worldsize.strategies.model_replica import ModelReplica
from worldsize.strategies.periodic.exchange import Exact, mean_of


class OuterOptimizer(ABC):
    """Synchronizes independent workers: it is called after every step, and decides what they exchange, and when."""

    sent_bytes: int = 0
    """Bytes that each worker has sent in exchanges since the run began."""

    @abstractmethod
    def after(self, step: int) -> None:
        """Make the exchanges that are due after this worker's step number ``step``, counted from 1."""

    def restart(self) -> None:  # noqa: B027 - some keep nothing
        """Restart from the present model, which has been loaded and is equal on all workers."""

    def state(self) -> StateDict:
        """Return the state kept between exchanges, equal on all workers."""
        return {}

    def load(self, state: StateDict) -> None:  # noqa: B027 - some keep nothing
        """Load what :meth:`state` returned."""


@final
class PeriodicSyncReplica(Replica):
    """Trains ``inner`` independently, and synchronizes it with the other workers by ``outer``.

    The saved model and optimizer are means over workers, from which any other strategy can resume. The part
    ``strategy`` also has each worker's own state, from which the same strategy resumes bit for bit.
    """

    def __init__(self, inner: ModelReplica, world: World, outer: OuterOptimizer) -> None:
        self._inner, self._world, self._outer = inner, world, outer
        self._exact = Exact(world)
        self._taken = 0  # steps since training began or resumed from a model alone

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        result = self._inner.step(micro_batches)
        self._taken += 1
        with phase("update"):
            self._outer.after(self._taken)
        return result

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        """Return the metrics of the mean model, so that it does not matter which worker evaluates which batch."""
        with self._mean_model():
            return self._inner.evaluate(batches)

    @contextmanager
    def _mean_model(self) -> Iterator[None]:
        now = self._inner.model.state_dict()
        kept = {name: tensor.clone() for name, tensor in now.items()}
        _copy(now, mean_of(now, self._exact))
        yield
        _copy(now, kept)

    def advance_schedules(self, value: float, *, step: int) -> None:
        self._inner.advance_schedules(value, step=step)

    def state(self) -> StateDict:
        alone = self._inner.state()
        mine = {"model": alone["model"], "optimizer": alone["optimizer"]["state"]}
        mean, scaler = mean_of(mine, self._exact), _figures(alone["scaler"])
        common = {"taken": self._taken, "sent_bytes": self._outer.sent_bytes, "outer": self._outer.state()}
        return {
            **alone,
            "model": mean["model"],
            "optimizer": {**alone["optimizer"], "state": mean["optimizer"]},
            "scaler": _with_figures(alone["scaler"], self._of_first(scaler)),
            "strategy": {**common, "workers": stack_per_rank({**mine, "scaler": scaler}, self._world)},
        }

    def _of_first(self, figures: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the values of worker 0."""
        sent = {name: figure.to(self._world.device, copy=True) for name, figure in figures.items()}
        if self._world.group is not None:
            for figure in sent.values():
                dist.broadcast(figure, group=self._world.group, group_src=0)
        return sent

    def load(self, state: StateDict) -> None:
        kept = state["strategy"]
        self._taken, self._outer.sent_bytes = kept["taken"], kept["sent_bytes"]
        if self._taken == 0:  # saved by another strategy, or by another number of workers
            self._inner.load(state)
            self._outer.restart()
            return
        mine = local_row(kept["workers"])
        alone = {"model": mine["model"], "optimizer": {**state["optimizer"], "state": mine["optimizer"]}}
        self._inner.load({**state, **alone, "scaler": _with_figures(state["scaler"], mine["scaler"])})
        self._outer.load(kept["outer"])

    def facts(self) -> Mapping[str, Any]:
        """Return the bytes that each worker has sent since the run began, without evaluations and checkpoints."""
        return {**self._inner.facts(), "sent_bytes": self._outer.sent_bytes}


_MOVING = ("scale", "_growth_tracker")  # entries of a gradient scaler's state that change


def _figures(scaler: StateDict) -> dict[str, Tensor]:
    return {name: torch.tensor(scaler[name]) for name in _MOVING if name in scaler}


def _with_figures(scaler: StateDict, figures: Mapping[str, Tensor]) -> StateDict:
    return {**scaler, **{name: figure.item() for name, figure in figures.items()}}


def _copy(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(values[name])
