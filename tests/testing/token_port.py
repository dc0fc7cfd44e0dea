"""A port that predicts the next token, and its original program, with optional mistakes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset

from worldsize.core import Recipe
from worldsize.testing import PortConfig, same_losses

Losses = Generator[Any, None, nn.Module]  # yields losses, returns the model


@final
class Sequences(Dataset[Any]):
    """Sequences of 3 to 9 tokens."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 10, (48,), generator=generator).tolist()
        self.rows = [torch.randint(1, 20, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def net(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 20)
    )


def rates(step: int) -> float:
    return 1 / (1 + step)


def pad(rows: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def nats(model: nn.Module, rows_bt: Tensor) -> tuple[Tensor, Tensor]:
    targets_bt = rows_bt[:, 1:]
    loss = F.cross_entropy(model(rows_bt[:, :-1]).flatten(0, 1), targets_bt.flatten(), ignore_index=0, reduction="sum")
    return loss, (targets_bt != 0).sum()


def groups(model: nn.Module, decay: float = 0.1) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": decay},
        {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
    ]


@final
@dataclass(frozen=True)
class Port(Recipe):
    """Predict the next token."""

    dropout: float = 0.0
    weighted: bool = True
    scheduled: bool = True

    def model(self) -> nn.Module:
        return net(self.dropout)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(groups(model), lr=0.01)

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        return LambdaLR(optimizer, rates) if self.scheduled else None

    def data(self, split: str) -> Sequences:
        return Sequences()

    def collate(self, samples: list[Tensor]) -> Tensor:
        return pad(samples)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        total, count = nats(model, batch)
        return (total, count) if self.weighted else total / count

    def evaluate(self, model: nn.Module, batch: Tensor) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"nats": nats(model, batch)}


@dataclass(frozen=True)
class Program:
    """A program's loop, with the planted mistakes."""

    own_model: Callable[[nn.Module], nn.Module] = lambda model: model
    optimizer: Callable[[nn.Module], Optimizer] = lambda model: torch.optim.AdamW(groups(model), lr=0.01)
    early: int = 0
    pieces: int = 1
    means: bool = False
    draws: bool = False
    zero_grad: bool = True
    clip: float | None = None
    times: float = 1.0

    def __call__(self, model: nn.Module, batches: Iterator[Tensor]) -> Losses:
        own = self.own_model(model)
        optimizer = self.optimizer(own)
        step = 0
        while micro_batches := [batch for _, batch in zip(range(self.pieces), batches, strict=False)]:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("first", group["lr"]) * rates(max(step + self.early, 0))
            if self.draws:
                torch.rand(1)
            losses = [nats(own, rows_bt) for rows_bt in micro_batches]
            if self.means:
                loss = torch.stack([total / count for total, count in losses]).mean()
            else:
                loss = torch.stack([total for total, _ in losses]).sum() / sum(int(count) for _, count in losses)
            if self.zero_grad:
                optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if self.clip:
                nn.utils.clip_grad_norm_(own.parameters(), self.clip)
            optimizer.step()
            step += 1
            yield loss.detach() * self.times
        return own


CONFIG = PortConfig(batch_size=8, steps=6)


def told(recipe: Recipe, reference: Any, config: PortConfig = CONFIG, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        same_losses(recipe, reference, config, **options)
    return str(caught.value)
