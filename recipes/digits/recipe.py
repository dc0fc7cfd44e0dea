"""Classify handwritten digits: 1,797 images, 8 × 8 pixels, ten classes (UCI, scikit-learn)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, final

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import TensorDataset

from worldsize.core import Range, Recipe

DATA = Path(__file__).with_name("digits.csv.gz")
_TEST = 360  # held-out images, one in five


@final
@dataclass(frozen=True)
class Digits(Recipe):
    """Train a CNN with ``width`` and ``2 × width`` channels and dropout before the classifier."""

    width: Annotated[int, Range(least=1)]
    dropout: Annotated[float, Range(least=0, most=1)]
    make_optimizer: Callable[..., Optimizer]
    make_schedule: Callable[[Optimizer], LRScheduler] | None = None

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, self.width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(self.width, 2 * self.width, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(self.dropout),
            nn.Linear(2 * self.width * 16, 10),
        )

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.make_optimizer(model.parameters())

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        return self.make_schedule(optimizer) if self.make_schedule else None

    def data(self, split: str) -> TensorDataset:
        """Return images float32 (n, 1, 8, 8) in 0..1 and labels int64 (n,); fixed random split."""
        images, labels = read_digits(DATA)
        order = torch.from_numpy(numpy.random.RandomState(0).permutation(len(labels)))  # same in all NumPy versions
        rows = order[:_TEST] if split == "test" else order[_TEST:]
        return TensorDataset(images[rows], labels[rows])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        images, labels = batch
        logits = model(images).float()
        count = torch.tensor(len(labels))
        loss = nn.functional.cross_entropy(logits, labels, reduction="none").double().sum()
        return {"accuracy": ((logits.argmax(1) == labels).sum(), count), "loss": (loss, count)}

    def files(self) -> Mapping[str, Path]:
        return {DATA.name: DATA}


@cache
def read_digits(path: Path) -> tuple[Tensor, Tensor]:
    """Read images float32 (1797, 1, 8, 8) in 0..1 and labels int64 (1797,)."""
    rows = torch.from_numpy(numpy.loadtxt(path, delimiter=",", dtype=numpy.float32))
    return rows[:, :64].reshape(-1, 1, 8, 8) / 16, rows[:, 64].long()
