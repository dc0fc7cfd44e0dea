"""Exact evaluation: the same figure at every world size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from worldsize.core import Replica, World
from worldsize.data.loader import evaluation_batches


def evaluate(replica: Replica, dataset: Any, world: World, *, batch_size: int) -> Mapping[str, float]:
    """Metrics of the whole of ``dataset``; no sample is counted twice, however the set divides."""
    return replica.evaluate(evaluation_batches(dataset, world, batch_size=batch_size))
