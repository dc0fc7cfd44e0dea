"""Contrastive learning of images, written after sthalles/SimCLR (MIT).

The loss compares each image with all others of its batch: it couples the samples of a micro-batch, and of no more.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR
from torch.utils.data import Dataset

from recipes.ports.digits import digits
from worldsize.core import Batch, Recipe


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.fc(self.backbone(images)), dim=1)


class Views(Dataset[Any]):
    def __init__(self, split: str) -> None:
        self.images, _ = digits(split)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._augmented(index), self._augmented(index)

    def _augmented(self, index: int) -> Tensor:
        shift = int(torch.randint(-1, 2, ()))
        return self.images[index].roll(shift, dims=2) + 0.2 * torch.randn(1, 8, 8)


def info_nce(features: Tensor, temperature: float = 0.07) -> Tensor:
    similarity = features @ features.t()
    half, same = len(features) // 2, torch.eye(len(features), dtype=torch.bool)
    positive = (torch.arange(len(features)) + half) % len(features)
    return F.cross_entropy(similarity.masked_fill(same, -math.inf) / temperature, positive)


def original(model: nn.Module, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=1e-4)
    scheduler = CosineAnnealingLR(optimizer, T_max=8, eta_min=0)
    for epoch_counter in range(3):
        for images in islice(batches, 8):  # 512 images in batches of 64
            features = model(images)
            loss = info_nce(features)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss
        if epoch_counter >= 1:  # the rate stays during the first epochs
            scheduler.step()
    return model


@final
class SimCLR(Recipe):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def model(self) -> nn.Module:
        return Encoder()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.lr, weight_decay=1e-4)

    def schedule(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * max(0, step // 8 - 1) / 8)) / 2)

    def data(self, split: str) -> Views:
        return Views(split)

    def collate(self, samples: list[Any]) -> Batch:
        return torch.cat([torch.stack(views) for views in zip(*samples, strict=True)])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return info_nce(model(batch))

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        count = torch.tensor(len(batch) // 2)
        return {"loss": (info_nce(model(batch)) * count, count)}
