"""A network that tells whether two digits are the same, after siamese_network of pytorch/examples (BSD-3-Clause).

The data set draws the second image of a pair, and whether it shows the same digit, at random.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import Dataset

from recipes.ports.digits import digits
from worldsize.core import Recipe


class SiameseNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(256, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, input1: Tensor, input2: Tensor) -> Tensor:
        both = torch.cat([self.features(input1), self.features(input2)], dim=1)
        return torch.sigmoid(self.fc(both)).squeeze(1)


class Pairs(Dataset[Any]):
    def __init__(self, split: str) -> None:
        self.images, self.labels = digits(split)
        self.by_digit = [torch.nonzero(self.labels == digit).flatten().tolist() for digit in range(10)]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        digit, target = int(self.labels[index]), random.randint(0, 1)
        others = digit if target else (digit + random.randint(1, 9)) % 10
        return self.images[index], self.images[random.choice(self.by_digit[others])], torch.tensor(float(target))


def original(model: nn.Module, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    criterion = nn.BCELoss()
    for _epoch in range(1, 4):
        model.train()
        for images_1, images_2, targets in islice(batches, 8):  # 512 pairs in batches of 64
            optimizer.zero_grad()
            outputs = model(images_1, images_2)
            loss = criterion(outputs, targets)
            loss.backward()
            optimizer.step()
            yield loss
        scheduler.step()
    return model


@final
class Siamese(Recipe):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def model(self) -> nn.Module:
        return SiameseNetwork()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.Adadelta(model.parameters(), lr=self.lr)

    def schedule(self, optimizer: Optimizer) -> StepLR:
        return StepLR(optimizer, step_size=8, gamma=0.7)

    def data(self, split: str) -> Pairs:
        return Pairs(split)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images_1, images_2, targets = batch
        return nn.functional.binary_cross_entropy(model(images_1, images_2), targets)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        images_1, images_2, targets = batch
        right = (model(images_1, images_2) > 0.5) == (targets > 0.5)
        return {"accuracy": (right.sum(), torch.tensor(len(targets)))}
