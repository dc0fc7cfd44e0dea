"""Collects the metrics of an evaluation batch by batch, and merges them over all processes in batch order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import final

import torch
from torch import Tensor

from worldsize.core import ConfigError, EvaluationBatch, Recipe, StateReduction, World
from worldsize.dist.exact import Sums, gather_tensors, reduce_metrics

_COMBINED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}


@final
class MetricCollector:
    """Metrics of this process's batches.

    Attributes:
        sums: Metrics that are a (sum, count) of scalars, by name, by the number of each batch that is not padding.
        names: Names of these metrics.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.sums: dict[int, Sums] = {}
        self.names: tuple[str, ...] = ()
        self._metrics = dict(recipe.metrics())
        self._states: dict[str, dict[int, Mapping[str, Tensor]]] = {name: {} for name in self._metrics}

    def add(self, batch: EvaluationBatch, metrics: Mapping[str, tuple[Tensor, ...]]) -> None:
        """Add the metrics that ``Recipe.evaluate`` returned for ``batch``; a padding batch adds only their names.

        A metric is two scalars (sum, count), or for a metric of ``Recipe.metrics`` tensors of any shape.

        Raises:
            ConfigError: a metric is neither a (sum, count) nor one of ``Recipe.metrics``, or one of these is missing.
        """
        if missing := self._metrics.keys() - metrics.keys():
            raise ConfigError(f"Recipe.metrics names {min(missing)!r}, for which Recipe.evaluate returns nothing.")
        pairs = {name: _pair(name, values) for name, values in metrics.items() if name not in self._metrics}
        self.names = tuple(sorted(pairs))
        if not batch.counted:
            return
        self.sums[batch.index] = pairs
        for name, metric in self._metrics.items():
            self._states[name][batch.index] = metric.state(*metrics[name])

    def reduce(self, world: World) -> dict[str, float]:
        """Return the metrics over the batches of all processes of ``world``, equal on each of them.

        Raises:
            ConfigError: two metrics computed a value of the same name.
        """
        values = reduce_metrics(self.sums, self.names, world)
        if not self._metrics:
            return values
        parts: dict[tuple[str, str, int], Tensor] = {}
        for name, metric in self._metrics.items():
            for key, by_index in _by_part(self._states[name]).items():
                own = _combined(metric.reduction(key), by_index)
                parts |= {(name, key, index): part.detach() for index, part in own.items()}
        ordered: dict[str, dict[str, list[Tensor]]] = {}
        for (name, key, _), part in gather_tensors(parts, world).items():
            ordered.setdefault(name, {}).setdefault(key, []).append(part)
        for name, metric in self._metrics.items():
            merged = {key: _merged(metric.reduction(key), each) for key, each in ordered[name].items()}
            _add(values, name, metric.compute(merged))
        return values


def _add(values: dict[str, float], name: str, value: float | Mapping[str, float]) -> None:
    """Add the value of the metric ``name``, or several values that it names itself."""
    computed = value if isinstance(value, Mapping) else {name: float(value)}
    if double := computed.keys() & values.keys():
        raise ConfigError(f"an evaluation has two metrics that are called {min(double)!r}. Rename one of them.")
    values.update(computed)


def _pair(name: str, values: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    if not isinstance(values, tuple) or len(values) != 2:
        raise ConfigError(
            f"Recipe.evaluate must return the metric {name!r} as (sum, count), or Recipe.metrics must name it."
        )
    return values


def _by_part(states: Mapping[int, Mapping[str, Tensor]]) -> dict[str, dict[int, Tensor]]:
    parts: dict[str, dict[int, Tensor]] = {}
    for index, state in sorted(states.items()):
        for key, part in state.items():
            parts.setdefault(key, {})[index] = part
    return parts


def _combined(reduction: StateReduction, by_index: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
    """Merge states locally if that is exact in any order, so that a process sends only one; float sums are not."""
    parts = list(by_index.values())
    if reduction == "cat" or (reduction == "sum" and any(part.is_floating_point() for part in parts)):
        return by_index
    return {min(by_index): _merged(reduction, parts)}


def _merged(reduction: StateReduction, parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if reduction == "cat" else reduce(_COMBINED[reduction], parts)
