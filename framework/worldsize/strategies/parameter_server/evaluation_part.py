"""A worker's part of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from worldsize.core import Recipe, RunContext
from worldsize.strategies.model_replica import autocast, collected_metrics


def evaluated_part(recipe: Recipe, model: nn.Module, context: RunContext, task: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate the part that ``task`` names, and return the facts for the message TICK.

    Args:
        recipe: The recipe that evaluates a batch.
        model: The recipe's model, with the weights to evaluate.
        context: The context of the run.
        task: The facts of the message TASK.
    """
    device = context.world.device
    batches = context.data.evaluation(task["split"], task["step"], task["part"], task["parts"])
    with autocast(device, context.numerics.precision):
        collector = collected_metrics(recipe, model, batches, device=device)
    sums_by_index = {
        i: {name: [float(a), float(b)] for name, (a, b) in each.items()} for i, each in collector.sums.items()
    }
    return {"part": task["part"], "sums": sums_by_index, "names": collector.names}
