"""A convolutional network for digits, written after mnist of pytorch/examples (BSD-3-Clause).

It has dropout, Adadelta, and a rate that falls after each epoch.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from recipes.ports.digits import digits
from worldsize.core import Recipe


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 1, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(256, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def original(model: nn.Module, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _epoch in range(1, 4):
        model.train()
        for data, target in islice(batches, 8):  # 512 images in batches of 64
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            loss.backward()
            optimizer.step()
            yield loss
        scheduler.step()
    return model


@final
class Mnist(Recipe):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def model(self) -> nn.Module:
        return Net()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.Adadelta(model.parameters(), lr=self.lr)

    def schedule(self, optimizer: Optimizer) -> StepLR:
        return StepLR(optimizer, step_size=8, gamma=0.7)

    def data(self, split: str) -> TensorDataset:
        return TensorDataset(*digits(split))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        data, target = batch
        return F.nll_loss(model(data), target)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        data, target = batch
        return {"accuracy": ((model(data).argmax(1) == target).sum(), torch.tensor(len(target)))}
