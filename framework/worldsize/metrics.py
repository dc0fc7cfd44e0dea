"""Evaluation metrics with the same values as on a single process over the whole split.

``MetricCollector`` collects metrics batch by batch and merges them over all processes in batch order. ``WholeSplit``
computes a metric with any function of all predictions; ``TorchMetric`` adapts a metric of torchmetrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from numbers import Real
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from worldsize.collectives.exact import Sums, gather_tensors, reduce_metrics
from worldsize.core import ConfigError, EvaluationBatch, Recipe, StateMetric, StateReduction, World
from worldsize.errors import require
from worldsize.moved import resolve_renamed

if TYPE_CHECKING:
    from torchmetrics import Metric


_COMBINED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


@final
class MetricCollector:
    """Collects the metrics of this process's batches.

    Attributes:
        sums: The (sum, count) metrics of each batch except padding, by batch index and name, as scalars.
        names: Names of the (sum, count) metrics.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.sums: dict[int, Sums] = {}
        self.names: tuple[str, ...] = ()
        self._metrics = dict(recipe.metrics())
        self._states: dict[str, dict[int, Mapping[str, Tensor]]] = {name: {} for name in self._metrics}

    def add(self, batch: EvaluationBatch, metrics: Mapping[str, tuple[Any, ...]]) -> None:
        """Add the metrics that ``Recipe.evaluate`` returned for ``batch``; for a padding batch, add only their names.

        A metric is a pair (sum, count) of scalar tensors or numbers, or if it is in ``Recipe.metrics``, a tuple of
        tensors of any shape.

        Raises:
            ConfigError: a metric in ``Recipe.metrics`` is missing, or another one is not a (sum, count) pair.
        """
        if missing := self._metrics.keys() - metrics.keys():
            raise ConfigError(
                f"Recipe.metrics defines {min(missing)!r}, but Recipe.evaluate does not return it. Return it, or "
                "remove it from Recipe.metrics."
            )
        pairs = {name: _check_pair(name, values) for name, values in metrics.items() if name not in self._metrics}
        self.names = tuple(sorted(pairs))
        if not batch.counted:
            return
        self.sums[batch.index] = pairs
        for name, metric in self._metrics.items():
            self._states[name][batch.index] = metric.state(*metrics[name])

    def reduce(self, world: World) -> dict[str, float]:
        """Return the metrics over the batches of all processes of ``world``, identical on every process.

        Raises:
            ConfigError: two metrics have the same name.
        """
        values = reduce_metrics(self.sums, self.names, world)
        if not self._metrics:
            return values
        parts: dict[tuple[str, str, int], Tensor] = {}
        for name, metric in self._metrics.items():
            for key, by_index in _group_by_part(self._states[name]).items():
                own = _merge_local_states(metric.reduction(key), by_index)
                parts |= {(name, key, index): part.detach() for index, part in own.items()}
        ordered: dict[str, dict[str, list[Tensor]]] = {}
        for (name, key, _), part in gather_tensors(parts, world).items():
            ordered.setdefault(name, {}).setdefault(key, []).append(part)
        for name, metric in self._metrics.items():
            merged = {key: _merge_parts(metric.reduction(key), each) for key, each in ordered[name].items()}
            _add_metric(values, name, metric.compute(merged))
        return values


def _add_metric(values: dict[str, float], name: str, value: float | Mapping[str, float]) -> None:
    """Add the value of metric ``name``, or each of its named values, to ``values``; refuse duplicate names."""
    computed = value if isinstance(value, Mapping) else {name: float(value)}
    if double := computed.keys() & values.keys():
        raise ConfigError(f"the evaluation has two metrics named {min(double)!r}. Rename one of them.")
    values.update(computed)


def _check_pair(name: str, values: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    if not isinstance(values, tuple) or len(values) != 2:
        raise ConfigError(
            f"Recipe.evaluate must return the metric {name!r} as (sum, count), or Recipe.metrics must define it."
        )
    return _convert_to_scalar(name, values[0]), _convert_to_scalar(name, values[1])


def _convert_to_scalar(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        if value.numel() == 1 and not value.is_complex():
            return value.reshape(())
        fact = f"a {value.dtype} tensor of shape {list(value.shape)}"
    elif isinstance(value, Real):
        return torch.tensor(float(value), dtype=torch.float64)
    else:
        fact = f"an object of type {type(value).__name__}"
    raise ConfigError(
        f"Recipe.evaluate returned {fact} for the metric {name!r}. Return (sum, count), two real scalars or numbers."
    )


def _group_by_part(states: Mapping[int, Mapping[str, Tensor]]) -> dict[str, dict[int, Tensor]]:
    parts: dict[str, dict[int, Tensor]] = {}
    for index, state in sorted(states.items()):
        for key, part in state.items():
            parts.setdefault(key, {})[index] = part
    return parts


def _merge_local_states(reduction: StateReduction, by_index: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    """Merge this process's states into one before sending, unless the order matters, as for float sums."""
    parts = list(by_index.values())
    if reduction == "cat" or (reduction == "sum" and any(part.is_floating_point() for part in parts)):
        return by_index
    return {min(by_index): _merge_parts(reduction, parts)}


def _merge_parts(reduction: StateReduction, parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if reduction == "cat" else reduce(_COMBINED[reduction], parts)


@final
class WholeSplit(StateMetric):
    """A metric that ``function`` computes from the outputs of ``Recipe.evaluate``, concatenated over all batches.

    Every process receives all outputs, so predictions and targets of the whole split must fit in its memory.

        def metrics(self):
            return {"auroc": WholeSplit(torchmetrics.functional.classification.binary_auroc)}

        def evaluate(self, model, batch):
            inputs, targets = batch
            return {"auroc": (model(inputs).sigmoid(), targets)}

    Args:
        function: Receives the tensors that ``evaluate`` returns, as (samples, ...) on the CPU, and returns a scalar.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def state(self, *inputs: Tensor) -> Mapping[str, Tensor]:
        if any(each.ndim == 0 for each in inputs):
            raise ConfigError(
                "a scalar cannot be concatenated over batches. Return tensors with samples as their first dimension."
            )
        return {f"{place:03d}": each for place, each in enumerate(inputs)}

    def reduction(self, name: str) -> StateReduction:
        return "cat"

    def compute(self, state: Mapping[str, Tensor]) -> float:
        return float(self._function(*(state[name] for name in sorted(state))))


_REDUCTIONS: Mapping[str, StateReduction] = {
    "dim_zero_sum": "sum",
    "dim_zero_cat": "cat",
    "dim_zero_min": "min",
    "dim_zero_max": "max",
}


@final
class TorchMetric(StateMetric):
    """A torchmetrics metric, updated with the tensors that ``Recipe.evaluate`` returns under its name.

        def metrics(self):
            return {"f1": TorchMetric(MulticlassF1Score(num_classes=10)), "auroc": TorchMetric(BinaryAUROC())}

    Summed states, such as the counts of F1, stay small. Concatenated states, such as the predictions of an AUROC
    without ``thresholds``, must fit in the memory of every process.

    Args:
        metric: The metric. It is copied, and does not communicate itself.

    Raises:
        ConfigError: torchmetrics is not installed, or the metric's states cannot be merged exactly.
    """

    def __init__(self, metric: Metric) -> None:
        require("TorchMetric", "torchmetrics>=1.8")
        self._metric = deepcopy(metric)
        self._reductions = {name: _reduction(metric, name, how) for name, how in metric._reductions.items()}

    def state(self, *inputs: Tensor) -> Mapping[str, Tensor]:
        metric = self._metric.to(inputs[0].device)
        metric.reset()
        metric.update(*inputs)
        return {name: _concatenate_state(getattr(metric, name)) for name in self._reductions}

    def reduction(self, name: str) -> StateReduction:
        return self._reductions[name]

    def compute(self, state: Mapping[str, Tensor]) -> float:
        metric = deepcopy(self._metric).to("cpu")
        metric.reset()
        for name, value in state.items():
            setattr(metric, name, [value] if isinstance(metric._defaults[name], list) else value)
        value = type(metric).compute(metric)  # the instance's compute() would also reduce over all processes
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigError(
                f"{type(metric).__name__} must compute a single number. Set its average argument, or use one "
                "TorchMetric per value."
            )
        return float(value)


def _reduction(metric: Metric, name: str, how: str | Callable[..., Any] | None) -> StateReduction:
    """Return the reduction that merges a state over batches; refuse custom reductions and nonzero-initialized sums."""
    reduction = _REDUCTIONS.get(getattr(how, "__name__", ""))
    default = metric._defaults[name]
    if reduction is None or (reduction == "sum" and isinstance(default, Tensor) and bool(default.any())):
        raise ConfigError(
            f"the custom reduction of state {name!r} in {type(metric).__name__} is not exact over batches. "
            "Return its inputs from Recipe.evaluate, and use worldsize.metrics.WholeSplit in Recipe.metrics."
        )
    return reduction


def _concatenate_state(state: Tensor | list[Tensor]) -> Tensor:
    if isinstance(state, Tensor):
        return state.detach().clone()
    return torch.cat([part if part.ndim else part[None] for part in state]).detach()


def __getattr__(name: str) -> Any:
    return resolve_renamed(__name__, name)
