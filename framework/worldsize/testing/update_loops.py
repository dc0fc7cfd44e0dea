"""Small programs whose peculiarity is their updates: several optimizers of one loss, losses by logical rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR
from torch.utils.data import default_collate

from worldsize.core import Batch, Loss, MicroBatch, MultiUpdateRecipe, Numerics, Update
from worldsize.testing.loops import Case, Loop
from worldsize.testing.recipes import ByMetric
from worldsize.testing.training import BATCH


@dataclass(frozen=True)
class SharedLoss(MultiUpdateRecipe):
    """A :class:`Loop` of which one optimizer updates the matrices and another the rest, by one loss."""

    def model(self) -> nn.Module:
        return Loop().model()

    def optimizers(self, model: nn.Module) -> Mapping[str, Optimizer]:
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        return {
            "matrices": torch.optim.SGD(matrices, lr=0.05, momentum=0.5),
            "others": torch.optim.AdamW(others, lr=0.01),
        }

    def schedules(self, optimizers: Mapping[str, Optimizer]) -> Mapping[str, LRScheduler]:
        return {name: StepLR(each, place + 2, 0.5) for place, (name, each) in enumerate(optimizers.items())}

    def data(self, split: str) -> Any:
        return Loop().data(split)

    def updates(self, model: nn.Module, batch: Batch, step: int) -> Iterable[Update]:
        yield ("others", "matrices"), Loop().loss(model, batch)

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
        return Loop().evaluate(model, batch)


def shared_loss(case: Case, batches: Sequence[Batch]) -> Mapping[str, Tensor]:
    """Take one backward pass a step, clip all gradients together, and let both optimizers step.

    ``batches``: inputs (batch, 4) and targets (batch, 1) of each step.
    """
    recipe, limit = case.recipe, case.numerics.clip_norm
    assert isinstance(recipe, SharedLoss)
    assert limit is not None
    model = recipe.model()
    optimizers = recipe.optimizers(model)
    schedules = recipe.schedules(optimizers)
    for batch in batches:
        model.zero_grad()
        Loop().loss(model, batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        for name, optimizer in optimizers.items():
            optimizer.step()
            schedules[name].step()
    return model.state_dict()


@dataclass(frozen=True)
class ByRank(Loop):
    """A program whose first logical rank adds a term to the loss: the output for a row that every batch ends with."""

    def collate(self, samples: list[Any]) -> Batch:
        inputs, targets = default_collate(samples)
        return torch.cat([inputs, torch.ones(1, 4)]), targets

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        total, weight = self._sums(model, batch, adds=True)
        return total / weight

    def micro_batch_loss(self, model: nn.Module, batch: MicroBatch) -> Loss:
        return self._sums(model, batch.data, adds=batch.logical_rank == 0)

    def _sums(self, model: nn.Module, batch: Batch, *, adds: bool) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        *_, last = outputs = model(inputs)
        total = (outputs[:-1] - targets).square().sum()
        return total + (BATCH * 0.1 * last.square().sum() if adds else last.sum() * 0), torch.tensor(len(targets))

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, Tensor]]:
        inputs, targets = batch
        return super().evaluate(model, (inputs[:-1], targets))


@dataclass(frozen=True)
class Plateau(Loop, ByMetric):
    """A program whose learning rate falls once an evaluation is not better by half than the best before.

    A part of its model stays in evaluation mode.
    """

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.9).eval(), nn.Tanh(), nn.Linear(8, 1))

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        return ReduceLROnPlateau(optimizer, factor=0.3, patience=1, threshold=0.5, cooldown=1)


@dataclass(frozen=True)
class Closures(Loop):
    """A program whose optimizer computes the loss several times in a step."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.LBFGS(model.parameters())


@dataclass(frozen=True)
class ByEpoch(Loop):
    """A program whose schedule must be told the epoch, as those of timm."""

    def schedule(self, optimizer: Optimizer) -> LRScheduler:
        schedule: Any = _EpochSchedule()
        return schedule  # type: ignore[no-any-return]


@final
class _EpochSchedule:
    def step(self, epoch: int) -> None:
        """Set the rate of ``epoch``."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load ``state``."""


UPDATES: Sequence[Case] = (
    Case("shared-loss", SharedLoss(), numerics=Numerics(clip_norm=0.5), reference=shared_loss),
    Case("loss-by-logical-rank", ByRank()),
    Case("plateau", Plateau(), steps=9),
    Case("closures", Closures()),
    Case("schedule-by-epoch", ByEpoch()),
)
