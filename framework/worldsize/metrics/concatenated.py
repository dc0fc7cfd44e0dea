"""A metric computed by any function of all predictions at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor

from worldsize.core import ConfigError, StateMetric, StateReduction


@final
class Concatenated(StateMetric):
    """Concatenates the outputs of ``Recipe.evaluate`` over all batches, in order, and calls ``function`` with them.

    Every process receives all of them: predictions and targets of the whole split must fit in its memory.

        def metrics(self):
            return {"auroc": Concatenated(torchmetrics.functional.classification.binary_auroc)}

        def evaluate(self, model, batch):
            inputs, targets = batch
            return {"auroc": (model(inputs).sigmoid(), targets)}

    Args:
        function: Takes the tensors that ``evaluate`` returns, as (samples, ...) on the CPU, and returns a scalar.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def state(self, *inputs: Tensor) -> Mapping[str, Tensor]:
        if any(each.ndim == 0 for each in inputs):
            raise ConfigError(
                "a scalar cannot be concatenated over batches. Return tensors whose first dimension is that of samples."
            )
        return {f"{place:03d}": each for place, each in enumerate(inputs)}

    def reduction(self, name: str) -> StateReduction:
        return "cat"

    def compute(self, state: Mapping[str, Tensor]) -> float:
        return float(self._function(*(state[name] for name in sorted(state))))
