"""Replica that trains independently and synchronizes with the center periodically."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from plugins.easgd.centre import Link
from worldsize.collectives.per_rank import local_row, stack_per_rank
from worldsize.collectives.step_timer import measure_phase
from worldsize.core import EvaluationBatch, MicroBatch, Replica, StateDict, StepResult, World
from worldsize.strategies.model_replica import ModelReplica
from worldsize.strategies.periodic import find_averaged_buffers, find_trained_parameters, frozen_parameters
from worldsize.strategies.periodic_exchange import Exact, average_tree, flatten_tensors, split_like

_HOST = torch.device("cpu")


@final
class ElasticReplica(Replica):
    """Trains ``inner``, and moves it toward the center by ``elasticity`` every ``period`` steps.

    Evaluation uses the center, and other strategies resume from it. Buffers such as BatchNorm statistics and the
    optimizer state are averaged over workers. The ``strategy`` entry of the state has each worker's own state, so that
    the same strategy resumes bit for bit.
    """

    def __init__(self, inner: ModelReplica, world: World, link: Link, *, period: int, elasticity: float) -> None:
        self._inner, self._world, self._link = inner, world, link
        self._period, self._elasticity = period, elasticity
        self._own = find_trained_parameters(inner.model)
        self._taken = 0  # steps since the start, or since resuming from a model without worker states
        self._sent_bytes = 0
        self._set_centre(self._flatten_parameters())

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        result = self._inner.step(micro_batches)
        self._taken += 1
        if self._taken % self._period == 0:
            with measure_phase("update"):  # includes communication: the link blocks
                mine_n = self._flatten_parameters()
                self._sent_bytes += mine_n.nbytes
                self._move_to(mine_n.lerp(self._link.pull_centre(mine_n), self._elasticity))
        return result

    def evaluate(self, batches: Iterable[EvaluationBatch]) -> Mapping[str, float]:
        with self._use_centre(self._fetch_centre()):
            return self._inner.evaluate(batches)

    def advance_schedules(self, value: float, *, step: int) -> None:
        self._inner.advance_schedules(value, step=step)

    def state(self) -> StateDict:
        alone, centre_n = self._inner.state(), self._fetch_centre()
        optimizer = alone["optimizer"]["state"]
        mine = {"model": alone["model"], "optimizer": optimizer}
        with self._use_centre(centre_n):
            model = {name: tensor.clone() for name, tensor in self._inner.model.state_dict().items()}
        return {
            **alone,
            "model": model,
            "optimizer": {**alone["optimizer"], "state": average_tree(optimizer, Exact(self._world))},
            "strategy": {"taken": self._taken, "centre": centre_n, "workers": stack_per_rank(mine, self._world)},
        }

    def load(self, state: StateDict) -> None:
        kept = state["strategy"]
        self._taken = kept["taken"]
        if self._taken == 0:  # saved by a different strategy or with a different number of workers
            self._inner.load(state)
            self._set_centre(self._flatten_parameters())
            return
        mine = local_row(kept["workers"])
        optimizer = {**state["optimizer"], "state": mine["optimizer"]}
        self._inner.load({**state, "model": mine["model"], "optimizer": optimizer})
        self._set_centre(kept["centre"].cpu())

    def facts(self) -> Mapping[str, Any]:
        """Return the bytes sent to the center by this worker, excluding evaluations and checkpoints."""
        return {"sent_bytes": self._sent_bytes}

    def close(self, *, complete: bool) -> None:
        self._link.close()

    def _flatten_parameters(self) -> Tensor:
        return flatten_tensors(self._own, _HOST)

    def _move_to(self, row_n: Tensor) -> None:
        for parameter, values in zip(self._own, split_like(row_n, self._own), strict=True):
            parameter.detach().copy_(values)

    def _set_centre(self, row_n: Tensor) -> None:
        """Set the center to worker 0's row, before the first exchange."""
        if self._world.rank == 0:
            self._link.set_centre(row_n)
        if self._world.group is not None:
            dist.barrier(self._world.group)

    def _fetch_centre(self) -> Tensor:
        """Return the center, equal on all workers."""
        row_n = self._link.read_centre() if self._world.rank == 0 else self._flatten_parameters()
        if self._world.group is None:
            return row_n
        dist.broadcast(sent_n := row_n.to(self._world.device), group=self._world.group, group_src=0)
        return sent_n.cpu()

    @contextmanager
    def _use_centre(self, centre_n: Tensor) -> Iterator[None]:
        """Temporarily load the center, and mean buffers and frozen parameters, into the model."""
        mine_n = self._flatten_parameters()
        shared = [
            tensor.detach()
            for tensor in (*find_averaged_buffers(self._inner.model), *frozen_parameters(self._inner.model))
        ]
        kept = [tensor.clone() for tensor in shared]
        self._move_to(centre_n)
        for tensor, mean in zip(shared, average_tree(shared, Exact(self._world)), strict=True):
            tensor.copy_(mean)
        yield
        self._move_to(mine_n)
        for tensor, before in zip(shared, kept, strict=True):
            tensor.copy_(before)
