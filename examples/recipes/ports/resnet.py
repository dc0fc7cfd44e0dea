"""A residual network with BatchNorm, written after references/classification of pytorch/vision (BSD-3-Clause).

It has momentum, label smoothing, no weight decay for the norms, and a rate that falls at milestones.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import TensorDataset

from recipes.ports.digits import digits
from worldsize.core import Recipe


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.downsample = nn.Identity() if inputs == outputs else shortcut

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return torch.relu(out + self.downsample(x))


def resnet() -> nn.Module:
    stem = nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
    blocks = BasicBlock(8, 8, 1), BasicBlock(8, 16, 2)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    norms = [p for module in model.modules() if isinstance(module, nn.BatchNorm2d) for p in module.parameters()]
    others = [p for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear) for p in module.parameters()]
    return [{"params": others, "weight_decay": 1e-4}, {"params": norms, "weight_decay": 0.0}]


def original(model: nn.Module, batches: Iterator[Any]) -> Generator[Tensor, None, nn.Module]:
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(groups(model), lr=0.1, momentum=0.9, nesterov=True)
    lr_scheduler = MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1)
    for _epoch in range(3):
        model.train()
        for image, target in islice(batches, 8):  # 512 images in batches of 64
            output = model(image)
            loss = criterion(output, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss
        lr_scheduler.step()
    return model


@final
class ResNet(Recipe):
    def __init__(self, lr: float) -> None:
        self.lr = lr

    def model(self) -> nn.Module:
        return resnet()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(groups(model), lr=self.lr, momentum=0.9, nesterov=True)

    def schedule(self, optimizer: Optimizer) -> MultiStepLR:
        return MultiStepLR(optimizer, milestones=[8, 16], gamma=0.1)

    def data(self, split: str) -> TensorDataset:
        return TensorDataset(*digits(split))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        image, target = batch
        return nn.functional.cross_entropy(model(image), target, label_smoothing=0.1)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        image, target = batch
        return {"accuracy": ((model(image).argmax(1) == target).sum(), torch.tensor(len(target)))}
