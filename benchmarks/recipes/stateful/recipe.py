"""A model of which a step changes more than its weights: statistics, a counter, random numbers, metrics and more."""

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
    """Passes its input on, and counts the steps in which it did."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden``, of any shape."""
        if self.training:
            self.calls += 1
        return hidden


class Stateful(Recipe):
    """Classifies points by which of two coordinates is larger."""

    def model(self) -> nn.Module:
        """Two layers, with statistics, random numbers and a counter between them."""
        first = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()]
        return nn.Sequential(*first, nn.Dropout(0.2), Counting(), nn.BatchNorm1d(16), nn.Linear(16, 2))

    def buffers(self, model: nn.Module) -> Mapping[str, BufferRule]:
        """A step counts once."""
        return {"*.calls": "equal"}

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """All layers, in order."""
        return list(model.children())

    def model_inputs(self, batch: Batch) -> tuple[Any, ...]:
        """The points, a tensor (batch, 8)."""
        return (batch[0],)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        """A rate that falls in each step."""
        return ExponentialLR(optimizer, 0.99)

    def data(self, split: str) -> TensorDataset:
        """Points (512, 8) and their classes."""
        points = torch.randn(512, 8, generator=torch.Generator().manual_seed(len(split)))
        return TensorDataset(points, (points[:, 0] > points[:, 1]).long())

    def loss(self, model: nn.Module, batch: Batch) -> LossOutput:
        """Cross entropy, with the share of right answers."""
        output = model(batch[0])
        return LossOutput(F.cross_entropy(output, batch[1]), _right(output, batch[1]))

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, ...]]:
        """The share of right answers."""
        return _right(model(batch[0]), batch[1])


class Remembering(Stateful):
    """Weighs each loss by a moving average of earlier points of its logical rank, which this object keeps."""

    remembers = True

    def __init__(self) -> None:
        self._averages: dict[int, float] = {}

    def state(self, logical_rank: int) -> dict[str, float]:
        """The moving average of a logical rank."""
        return {"average": self._averages.get(logical_rank, 1.0)}

    def load_state(self, logical_rank: int, state: Mapping[str, float]) -> None:
        """Replace the moving average of a logical rank."""
        self._averages[logical_rank] = state["average"]

    def micro_batch_loss(self, model: nn.Module, batch: MicroBatch) -> LossOutput:
        """The loss of a logical rank, weighed by its moving average."""
        rank, output = batch.logical_rank, self.loss(model, batch.data)
        self._averages[rank] = average = 0.9 * self._averages.get(rank, 1.0) + float(batch.data[0].mean())
        assert isinstance(output.loss, Tensor)
        return LossOutput(output.loss * (1 + abs(average)), output.metrics)


def _right(output: Tensor, classes: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
    return {"right": ((output.argmax(1) == classes).sum().double(), torch.tensor(len(classes)))}
