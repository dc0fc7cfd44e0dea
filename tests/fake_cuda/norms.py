"""The digits recipe with a layer whose statistics change in training, and with further buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recipes.digits.recipe import Digits
from worldsize.core import BufferRule


class Counted(nn.Module):
    """Counts its steps, and has a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: Tensor
        self.scale: Tensor
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
        return images * self.scale


@dataclass(frozen=True)
class Norms(Digits):  # type: ignore[misc]  # final for users
    """Digits after a batch norm and a count of steps."""

    def model(self) -> nn.Module:
        return nn.Sequential(Counted(), nn.BatchNorm2d(1), super().model())

    def buffers(self, model: nn.Module) -> Mapping[str, BufferRule]:
        return {"0.steps": "equal"}
