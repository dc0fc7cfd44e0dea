"""Train a linear layer on windows of tokens, so cheap that data loading dominates a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, Subset

from worldsize.core import Recipe
from worldsize.data.source import Source

_FEATURES = 16  # tokens


@final
@dataclass(frozen=True)
class Windows(Recipe):
    source: Source
    make_optimizer: Callable[..., Optimizer]

    def model(self) -> nn.Module:
        return nn.Linear(_FEATURES, 1)

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.make_optimizer(model.parameters())

    def data(self, split: str) -> Dataset[Any]:
        return self.source if split == "train" else Subset(self.source, range(8))

    def fingerprints(self) -> Mapping[str, Mapping[str, Any]]:
        return {"source": self.source.fingerprint()}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        tokens = batch.float() / 65536
        return nn.functional.mse_loss(model(tokens[:, :_FEATURES]), tokens[:, -1:])

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"loss": (self.loss(model, batch) * len(batch), torch.tensor(len(batch)))}
