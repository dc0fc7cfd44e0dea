"""Metrics that are not a ratio of sums, such as AUROC."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor

StateReduction = Literal["sum", "min", "max", "cat"]


class StateMetric(ABC):
    """A metric over a whole split, computed from the merged states of all batches.

    :class:`worldsize.metrics.TorchMetric` adapts torchmetrics, and :class:`worldsize.metrics.WholeSplit` any function
    of all predictions.
    """

    @abstractmethod
    def state(self, *inputs: Tensor) -> Mapping[str, Tensor]:
        """Return one batch's state, given the tensors that ``Recipe.evaluate`` returned for it."""

    @abstractmethod
    def reduction(self, name: str) -> StateReduction:
        """Return how to merge entry ``name`` of the states; "cat" concatenates in batch order."""

    @abstractmethod
    def compute(self, state: Mapping[str, Tensor]) -> float | Mapping[str, float]:
        """Compute the metric from the merged state.

        ``state``: CPU tensors, shaped as :meth:`state` returned them. Entries merged by "cat" are longer in their first
        dimension. A metric with several values returns them by name; these names replace the metric's own.
        """
