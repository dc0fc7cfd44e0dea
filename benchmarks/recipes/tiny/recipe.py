"""Train a 64-64-10 MLP on random data, so small that the loop's overhead dominates the step time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from worldsize.core import Recipe


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(4096, 64, generator=generator), torch.randint(10, (4096,), generator=generator))


@final
@dataclass(frozen=True)
class Tiny(Recipe):
    make_optimizer: Callable[..., Optimizer]

    def model(self) -> nn.Module:
        return model()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.make_optimizer(model.parameters())

    def data(self, split: str) -> TensorDataset:
        return dataset()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        inputs, labels = batch
        return {"accuracy": ((model(inputs).argmax(1) == labels).sum(), torch.tensor(len(labels)))}
