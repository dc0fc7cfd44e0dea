"""Evaluates exactly: the figure is the same at every world size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import default_collate

from worldsize.core import EvaluationBatches, Replica, World
from worldsize.data.evaluation import evaluation_batches
from worldsize.data.fetch import Collate


def evaluate(
    replica: Replica, dataset: Any, world: World, *, batch_size: int, collate: Collate = default_collate
) -> Mapping[str, float]:
    """Return the metrics of the whole ``dataset``; every sample counts once, however many ranks there are."""
    return replica.evaluate(
        EvaluationBatches(lambda: evaluation_batches(dataset, world, batch_size=batch_size, collate=collate))
    )
