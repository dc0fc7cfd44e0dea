"""A metric of all predictions at once, by any function of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor

from worldsize.core import ConfigError, StateMetric, StateReduction


@final
class Concatenated(StateMetric):
    """Concatenates what ``Recipe.evaluate`` returns over all batches, in their order, and calls ``function`` with it.

    Every process receives all of it: predictions and targets of the whole split have to fit in its memory.

        def metrics(self):
            return {"auroc": Concatenated(torchmetrics.functional.classification.binary_auroc)}

        def evaluate(self, model, batch):
            inputs, targets = batch
            return {"auroc": (model(inputs).sigmoid(), targets)}

    Args:
        function: Takes as many tensors as ``evaluate`` returns, on the CPU, and returns a scalar.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def state(self, *inputs: Tensor) -> Mapping[str, Tensor]:
        if any(each.ndim == 0 for each in inputs):
            raise ConfigError("what is concatenated over batches needs a dimension for samples; a scalar has none.")
        return {f"{place:03d}": each for place, each in enumerate(inputs)}

    def reduction(self, name: str) -> StateReduction:
        return "cat"

    def compute(self, state: Mapping[str, Tensor]) -> float:
        return float(self._function(*(state[name] for name in sorted(state))))
