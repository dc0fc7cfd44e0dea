"""Small programs with untrainable losses in some micro-batches, or with unusual gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from worldsize.core import Batch, FeatureRecipe, Features, Numerics
from worldsize.testing.loops import Case, Loop


def _is_odd(batch: Any) -> bool:
    """Return a pseudo-random choice that depends on the data: True for about half of all micro-batches."""
    return int((batch[0].sum() * 1000).abs()) % 2 == 1


class ConstantLoss(Loop):
    """The loss has no graph in some micro-batches, as if all labels were masked."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return torch.zeros(()) if _is_odd(batch) else super().loss(model, batch)


class LateConstantLoss(Loop):
    """From step 3 on, the loss has no graph in some micro-batches."""

    def loss_at(self, model: nn.Module, batch: Any, step: int) -> Tensor:
        return torch.zeros(()) if step > 2 and _is_odd(batch) else self.loss(model, batch)


class ChangingForm(Loop):
    """The loss is a mean in some micro-batches, and (sum, weight) in others."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        mean, weight = super().loss(model, batch), torch.tensor(float(len(batch[0])))
        return (mean * weight, weight) if _is_odd(batch) else mean


class Exchanging(Loop):
    """The loss uses the mean output over all processes, as some programs for DDP do."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if not dist.is_initialized():
            return loss
        outputs: Tensor = model(batch[0])
        mean = outputs.detach().mean()
        dist.all_reduce(mean)
        return loss + mean * outputs.mean()


class _Towers(nn.Module):
    """Encoders of inputs and targets, a predictor used only by the loss, and a log temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.targets = nn.Linear(1, 3)
        self.predictor = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.zeros(()))


class Contrast(FeatureRecipe, Loop):
    """Contrasts each input with the targets of all samples in the step."""

    def build_net(self) -> nn.Module:
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


def _train_nothing(case: Case, batches: Sequence[Batch]) -> Mapping[str, Tensor]:
    """Return no weights, since no strategy should be able to train the case."""
    return {}


LOSS_CASES: Sequence[Case] = (
    Case("constant-loss", ConstantLoss(), reference=_train_nothing, apart=True),
    Case("contrast", Contrast()),
    Case("exchanging-loss", Exchanging(), apart=True),
    Case("changing-form", ChangingForm(), reference=_train_nothing, apart=True),
)


_EXPERTS = 6


@dataclass(frozen=True)
class Experts(Loop):
    """Routes samples to six experts, some of them unused in a micro-batch; one layer is never used.

    Weight decay distinguishes a zero gradient from a missing one.
    """

    def build_net(self) -> nn.Module:
        return _ExpertNet()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, weight_decay=0.5)

    def data(self, split: str) -> TensorDataset:
        inputs, targets = super().data(split).tensors
        return TensorDataset(inputs, targets, torch.arange(len(inputs)) % _EXPERTS)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0], batch[2]), batch[1])

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"error": ((model(batch[0], batch[2]) - batch[1]).square().sum(), torch.tensor(len(batch[0])))}


@dataclass(frozen=True)
class Unfreezing(Loop):
    """Unfreezes the first layer in step 4; with ``trains_first``, freezes it instead."""

    trains_first: bool = False

    def model(self) -> nn.Module:
        return self._set_trainable(super().model(), trains=self.trains_first)

    def loss_at(self, model: nn.Module, batch: Any, step: int) -> Tensor:
        if step == 4:
            self._set_trainable(model, trains=not self.trains_first)
        return self.loss(model, batch)

    def _set_trainable(self, model: nn.Module, *, trains: bool) -> nn.Module:
        for name, parameter in model.named_parameters():
            if name.removeprefix("module.").startswith("0."):
                parameter.requires_grad_(trains)
        return model


@dataclass(frozen=True)
class Hooked(Loop):
    """Clips gradients in tensor or post-accumulate hooks, registered at the start or after ``from_step``."""

    accumulated: bool = False
    from_step: int = 0

    def model(self) -> nn.Module:
        model = super().model()
        if self.from_step == 0:
            self._register_hooks(model)
        return model

    def optimizer(self, model: nn.Module) -> Optimizer:
        optimizer = super().optimizer(model)
        steps = []

        def count_step(*_: object) -> None:
            steps.append(1)
            if len(steps) == self.from_step:
                self._register_hooks(model)

        if self.from_step:
            optimizer.register_step_post_hook(count_step)
        return optimizer

    def _register_hooks(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            if self.accumulated:
                parameter.register_post_accumulate_grad_hook(_clip_accumulated)  # type: ignore[no-untyped-call]
            else:
                parameter.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))  # type: ignore[no-untyped-call]


def _clip_accumulated(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-0.05, 0.05).mul_(0.5)


class PartlyOptimized(Loop):
    """The optimizer updates only the last layer, although the first one requires gradients, too."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        assert isinstance(model, nn.Sequential)
        return torch.optim.SGD(model[2].parameters(), lr=0.1)


class _ExpertNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 8) for _ in range(_EXPERTS))
        self.out = nn.Linear(8, 1)
        self.spare = nn.Linear(4, 4)

    def forward(self, inputs: Tensor, chosen: Tensor) -> Tensor:
        hidden = inputs.new_zeros(len(inputs), 8)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            if len(rows):
                hidden = hidden.index_put((rows,), torch.tanh(expert(inputs[rows])))
        out: Tensor = self.out(hidden)
        return out


GRADIENT_CASES: Sequence[Case] = (
    Case("experts", Experts()),
    Case("unfreezes", Unfreezing()),
    Case("freezes", Unfreezing(trains_first=True)),
    Case("hook-on-gradient", Hooked()),
    Case("hook-on-accumulated-gradient", Hooked(accumulated=True)),
    Case("hook-registered-later", Hooked(from_step=3)),
    Case("clips-what-the-optimizer-lacks", PartlyOptimized(), numerics=Numerics(clip_norm=0.1)),
)
