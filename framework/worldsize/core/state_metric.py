"""Metrics that are not a ratio of sums, such as AUROC."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # torch takes seconds
    from torch import Tensor

StateReduction = Literal["sum", "min", "max", "cat"]


class StateMetric(ABC):
    """A metric of a whole split: each batch has a state, states are merged, and the value is computed from the result.

    :mod:`worldsize.metrics` adapts torchmetrics, :mod:`worldsize.metrics` any function of all
    predictions.
    """

    @abstractmethod
    def state(self, *inputs: Tensor) -> Mapping[str, Tensor]:
        """Return the state of one batch, given the tensors (of any shape) that ``Recipe.evaluate`` returned for it."""

    @abstractmethod
    def reduction(self, name: str) -> StateReduction:
        """Return how entry ``name`` of two batches' states is merged; "cat" concatenates in the order of batches."""

    @abstractmethod
    def compute(self, state: Mapping[str, Tensor]) -> float | Mapping[str, float]:
        """Return the metric's value, given the merged state: CPU tensors, shaped as :meth:`state` returned them.

        Entries merged by "cat" are longer in their first dimension. A metric with several values returns each under its
        own name, which replaces the metric's.
        """
