"""Programs whose losses cannot be trained in some micro-batch: each strategy refuses them before the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from worldsize.core import Batch
from worldsize.testing.loops import Case, Loop


def _is_odd(batch: Any) -> bool:
    """Choose about half of all micro-batches."""
    return int((batch[0].sum() * 1000).abs()) % 2 == 1


class ConstantLoss(Loop):
    """The loss has no graph in some micro-batches, as where nothing counts."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.zeros(()) if _is_odd(batch) else super().loss(model, batch)


class ChangingForm(Loop):
    """The loss is a mean in some micro-batches, and a sum with its weight in others."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        mean, weight = super().loss(model, batch), torch.tensor(float(len(batch[0])))
        return (mean * weight, weight) if _is_odd(batch) else mean


def _nothing(case: Case, batches: Sequence[Batch]) -> Mapping[str, Tensor]:
    """Return no weights: a strategy that trains the case is wrong."""
    return {}


LOSS_CASES: Sequence[Case] = (
    Case("constant-loss", ConstantLoss(), reference=_nothing, apart=True),
    Case("changing-form", ChangingForm(), reference=_nothing, apart=True),
)
