"""Local SGD: independent workers that periodically average their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from worldsize.core import Cluster, Cost, Recipe, Workload, World
from worldsize.strategies.periodic import (
    OuterOptimizer,
    PeriodicSyncStrategy,
    averaging_cost,
    find_averaged_buffers,
    find_trained_parameters,
)
from worldsize.strategies.periodic_exchange import Exact, flatten_tensors, move_means_to_host, split_like
from worldsize.strategies.train_state import TrainState

OptimizerState = Literal["local", "mean", "zero"]


@final
@dataclass(frozen=True)
class LocalSGD(PeriodicSyncStrategy):
    """Average parameters and buffers every ``inner_steps`` steps (Stich 2019, arXiv 1805.09767).

    ``optimizer_state``: whether workers keep their own optimizer state at a synchronization ("local"), average it
    ("mean") or reset it to zero ("zero").
    """

    optimizer_state: OptimizerState = "local"

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        return averaging_cost(work, cluster, every=self.inner_steps)

    def outer(self, recipe: Recipe, train_state: TrainState, world: World) -> OuterOptimizer:
        return Averaging(train_state, Exact(world), self.inner_steps, self.optimizer_state)


@final
class Averaging(OuterOptimizer):
    """Averages the workers every ``every`` steps."""

    def __init__(self, train_state: TrainState, exchange: Exact, every: int, optimizer_state: OptimizerState) -> None:
        self._train_state, self._exchange = train_state, exchange
        self._every, self._optimizer_state = every, optimizer_state

    def run_due_exchanges(self, step: int) -> None:
        if step % self._every == 0:
            model = self._train_state.model
            self._average_tensors(
                [*find_trained_parameters(model), *find_averaged_buffers(model), *self._select_state_tensors()]
            )

    def _select_state_tensors(self) -> list[Tensor]:
        """Return the optimizer state to average. With "zero", reset it instead and return nothing."""
        states = [kept for optimizer in self._train_state.optimizers for kept in optimizer.state.values()]
        values = [value for kept in states for value in kept.values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        if self._optimizer_state == "zero":
            for tensor in tensors:
                tensor.zero_()
        return tensors if self._optimizer_state == "mean" else []

    def _average_tensors(self, tensors: list[Tensor]) -> None:
        tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
        row_n = flatten_tensors(tensors, self._exchange.device)
        self.sent_bytes += self._exchange.count_sent_bytes(row_n.numel())
        means = move_means_to_host(split_like(self._exchange.start_average(row_n)()(), tensors), tensors)
        torch._foreach_copy_([tensor.detach() for tensor in tensors], list(means))
