"""Metrics that are no quotient of sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # torch takes seconds
    from torch import Tensor

StateReduction = Literal["sum", "min", "max", "cat"]


class StateMetric(ABC):
    """A metric of a whole split: each batch has a state, the states are merged, and the value follows from all.

    :mod:`worldsize.metrics.torchmetrics` has those of torchmetrics, :mod:`worldsize.metrics.concatenated` any function
    of all predictions.
    """

    @abstractmethod
    def state(self, *inputs: Tensor) -> Mapping[str, Tensor]:
        """Return the state of one batch, from what ``Recipe.evaluate`` returned under the metric's name."""

    @abstractmethod
    def reduction(self, name: str) -> StateReduction:
        """Say how part ``name`` of the states of two batches is merged; "cat" concatenates in the order of batches."""

    @abstractmethod
    def compute(self, state: Mapping[str, Tensor]) -> float | Mapping[str, float]:
        """Return the metric's value, given the merged state on the CPU.

        A metric that computes several values at once returns each under a name of its own, in place of the metric's.
        """
