"""Programs whose losses cannot be trained in some micro-batch: each strategy refuses them before the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worldsize.core import Batch, FeatureRecipe, Features
from worldsize.testing.loops import Case, Loop


def _is_odd(batch: Any) -> bool:
    """Choose about half of all micro-batches."""
    return int((batch[0].sum() * 1000).abs()) % 2 == 1


class ConstantLoss(Loop):
    """The loss has no graph in some micro-batches, as where nothing counts."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.zeros(()) if _is_odd(batch) else super().loss(model, batch)


class LateConstantLoss(Loop):
    """The loss has no graph in some micro-batches of the third step and later ones."""

    def loss_at(self, model: nn.Module, batch: Any, step: int) -> Tensor:
        return torch.zeros(()) if step > 2 and _is_odd(batch) else self.loss(model, batch)


class ChangingForm(Loop):
    """The loss is a mean in some micro-batches, and a sum with its weight in others."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        mean, weight = super().loss(model, batch), torch.tensor(float(len(batch[0])))
        return (mean * weight, weight) if _is_odd(batch) else mean


class Exchanging(Loop):
    """The loss adds the mean output of all processes where there are others, as programs for DDP do."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if not dist.is_initialized():
            return loss
        outputs: Tensor = model(batch[0])
        mean = outputs.detach().mean()
        dist.all_reduce(mean)
        return loss + mean * outputs.mean()


class _Towers(nn.Module):
    """Encoders of inputs and targets, a predictor that only the loss uses, and the logarithm of a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.targets = nn.Linear(1, 3)
        self.predictor = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.zeros(()))


class Contrast(FeatureRecipe, Loop):
    """Contrasts each input with the targets of all samples of the step."""

    def net(self) -> nn.Module:
        return _Towers()

    def features(self, model: nn.Module, batch: Any) -> Sequence[Tensor]:
        assert isinstance(model, _Towers)
        return model.inputs(batch[0]), model.targets(batch[1]), torch.arange(len(batch[0]))

    def feature_loss(self, model: nn.Module, features: Features, batch: Any) -> Tensor:
        assert isinstance(model, _Towers)
        inputs, targets, _ = features.everyone
        own = features.own[0]
        logits = model.scale.exp() * inputs[own] @ model.predictor(targets).T
        return nn.functional.cross_entropy(logits, torch.arange(len(inputs))[own])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        assert isinstance(loss, Tensor)
        return loss

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"error": (self.loss(model, batch) * len(batch[0]), torch.tensor(len(batch[0])))}


def _nothing(case: Case, batches: Sequence[Batch]) -> Mapping[str, Tensor]:
    """Return no weights: a strategy that trains the case is wrong."""
    return {}


LOSS_CASES: Sequence[Case] = (
    Case("constant-loss", ConstantLoss(), reference=_nothing, apart=True),
    Case("contrast", Contrast()),
    Case("exchanging-loss", Exchanging(), apart=True),
    Case("changing-form", ChangingForm(), reference=_nothing, apart=True),
)
