"""Recipes whose steps change more than weights: batch statistics, a counter, random numbers, metrics, recipe state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import TensorDataset

from worldsize.core import Batch, BufferRule, LossOutput, MicroBatch, Recipe


class Counting(nn.Module):
    """Identity module that counts its forward passes in training mode."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` unchanged."""
        if self.training:
            self.calls += 1
        return hidden


class Stateful(Recipe):
    """Learn which of a point's first two coordinates is larger."""

    def model(self) -> nn.Module:
        """Return two linear layers with batch norm, dropout and a counter between them."""
        first = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()]
        return nn.Sequential(*first, nn.Dropout(0.2), Counting(), nn.BatchNorm1d(16), nn.Linear(16, 2))

    def buffers(self, model: nn.Module) -> Mapping[str, BufferRule]:
        """Declare that the counter is equal on all ranks."""
        return {"*.calls": "equal"}

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return all layers, in order."""
        return list(model.children())

    def model_inputs(self, batch: Batch) -> tuple[Any, ...]:
        """Return the points, a tensor (batch, 8)."""
        return (batch[0],)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Return AdamW with a learning rate of 0.01."""
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """Return a schedule that lowers the learning rate by 1% per step."""
        return ExponentialLR(optimizer, 0.99)

    def data(self, split: str) -> TensorDataset:
        """Return points (512, 8) and their classes (512,)."""
        points = torch.randn(512, 8, generator=torch.Generator().manual_seed(len(split)))
        return TensorDataset(points, (points[:, 0] > points[:, 1]).long())

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Return the cross entropy, and the accuracy as a metric."""
        output = model(batch[0])
        return LossOutput(F.cross_entropy(output, batch[1]), _right(output, batch[1]))

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, ...]]:
        """Return the accuracy as (sum, count)."""
        return _right(model(batch[0]), batch[1])


class Remembering(Stateful):
    """Weight losses by a moving average of each logical rank's earlier points, stored in the recipe."""

    remembers = True

    def __init__(self) -> None:
        self._averages: dict[int, float] = {}

    def state(self, logical_rank: int) -> dict[str, float]:
        """Return the moving average of a logical rank."""
        return {"average": self._averages.get(logical_rank, 1.0)}

    def load_state(self, logical_rank: int, state: Mapping[str, float]) -> None:
        """Set the moving average of a logical rank."""
        self._averages[logical_rank] = state["average"]

    def micro_batch_loss(self, model: nn.Module, batch: MicroBatch) -> LossOutput:
        """Return the loss of a micro-batch, weighted by the average of its logical rank."""
        rank, output = batch.logical_rank, self.loss(model, batch.data)
        self._averages[rank] = average = 0.9 * self._averages.get(rank, 1.0) + float(batch.data[0].mean())
        assert isinstance(output.loss, Tensor)
        return LossOutput(output.loss * (1 + abs(average)), output.metrics)


def _right(output: Tensor, classes: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
    return {"right": ((output.argmax(1) == classes).sum().double(), torch.tensor(len(classes)))}
