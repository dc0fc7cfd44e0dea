"""Trains and evaluates a recipe in plain PyTorch, with which strategies are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from worldsize.core import Batch, EvaluationBatches, MultiUpdateRecipe, Recipe, Replica, World
from worldsize.data.batches import Collate
from worldsize.data.loader import evaluation_batches
from worldsize.strategies.loss_record import mean_loss
from worldsize.strategies.multi_train_state import optimizers_of
from worldsize.strategies.train_state import optimizer_of

Step = Callable[[Batch, int], float]


def plain_step(recipe: Recipe, model: nn.Module) -> Step:
    """Return a function that trains ``model`` by one step, and returns the loss before the update.

    The function takes a batch and the number of the step, from 1.
    """
    return _several_updates(recipe, model) if isinstance(recipe, MultiUpdateRecipe) else _one_update(recipe, model)


def _one_update(recipe: Recipe, model: nn.Module) -> Step:
    optimizer = optimizer_of(recipe, model)

    def step(batch: Batch, _: int) -> float:
        loss = mean_loss(recipe.loss(model, batch))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    return step


def _several_updates(recipe: MultiUpdateRecipe, model: nn.Module) -> Step:
    optimizers = optimizers_of(recipe, model)
    schedules = recipe.schedules(optimizers)

    def step(batch: Batch, number: int) -> float:
        total = 0.0
        for names, loss in recipe.updates(model, batch, number):
            model.zero_grad()
            mean_loss(loss).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            for name in (names,) if isinstance(names, str) else names:
                optimizers[name].step()
                if name in schedules:
                    schedules[name].step()
            total += float(mean_loss(loss).detach())
        return total

    return step


def evaluate(
    replica: Replica, dataset: Any, world: World, *, batch_size: int, collate: Collate = default_collate
) -> Mapping[str, float]:
    """Return the metrics of the whole ``dataset``; every sample counts once, however many ranks there are."""
    return replica.evaluate(
        EvaluationBatches(lambda: evaluation_batches(dataset, world, batch_size=batch_size, collate=collate))
    )
