"""Adapts torchmetrics: values equal those that one process would compute over the whole split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from worldsize.core import ConfigError, StateMetric, StateReduction

if TYPE_CHECKING:
    from torchmetrics import Metric

_REDUCTIONS: Mapping[str, StateReduction] = {
    "dim_zero_sum": "sum",
    "dim_zero_cat": "cat",
    "dim_zero_min": "min",
    "dim_zero_max": "max",
}


@final
class TorchMetric(StateMetric):
    """A metric of torchmetrics that is updated with what ``Recipe.evaluate`` returns under its name.

        def metrics(self):
            return {"f1": TorchMetric(MulticlassF1Score(num_classes=10)), "auroc": TorchMetric(BinaryAUROC())}

    States that torchmetrics sums, such as the counts of F1, stay small. States that it concatenates, such as the
    predictions of an AUROC without ``thresholds``, must fit in the memory of every process.

    Args:
        metric: The metric. It is copied, and never communicates itself.

    Raises:
        ConfigError: torchmetrics is not installed, or the metric's states cannot be merged exactly.
    """

    def __init__(self, metric: Metric) -> None:
        if find_spec("torchmetrics") is None:
            raise ConfigError("TorchMetric needs torchmetrics, which is not installed. Add it: uv add torchmetrics.")
        self._metric = deepcopy(metric)
        self._reductions = {name: _reduction(metric, name, how) for name, how in metric._reductions.items()}

    def state(self, *inputs: Tensor) -> Mapping[str, Tensor]:
        metric = self._metric.to(inputs[0].device)
        metric.reset()
        metric.update(*inputs)
        return {name: _whole(getattr(metric, name)) for name in self._reductions}

    def reduction(self, name: str) -> StateReduction:
        return self._reductions[name]

    def compute(self, state: Mapping[str, Tensor]) -> float:
        metric = deepcopy(self._metric).to("cpu")
        metric.reset()
        for name, value in state.items():
            setattr(metric, name, [value] if isinstance(metric._defaults[name], list) else value)
        value = type(metric).compute(metric)  # the instance's own compute would add up the states of all processes
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigError(
                f"{type(metric).__name__} computes more than one number. Give it an average, or wrap one for each."
            )
        return float(value)


def _reduction(metric: Metric, name: str, how: str | Callable[..., Any] | None) -> StateReduction:
    """Return how a state is merged; a sum that does not begin at zero would add its initial value for every batch."""
    reduction = _REDUCTIONS.get(getattr(how, "__name__", ""))
    default = metric._defaults[name]
    if reduction is None or (reduction == "sum" and isinstance(default, Tensor) and bool(default.any())):
        raise ConfigError(
            f"{type(metric).__name__} merges its state {name!r} in its own way, which is not exact over batches. "
            "Return its inputs instead, and name worldsize.metrics.concatenated.Concatenated in Recipe.metrics."
        )
    return reduction


def _whole(state: Tensor | list[Tensor]) -> Tensor:
    if isinstance(state, Tensor):
        return state.detach().clone()
    return torch.cat([part if part.ndim else part[None] for part in state]).detach()
