"""Ends a run once a metric has stopped improving: a pure function of its evaluations, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, final

from worldsize.core.limits import COUNT, LARGEST, Key, Range
from worldsize.errors import ConfigError, neighbours

Evaluations = Sequence[tuple[int, Mapping[str, float]]]
"""The step and the metrics of each evaluation of a run, in order."""


@final
@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run after ``patience`` consecutive evaluations whose ``metric`` is not better than the best before them.

    A value is better if it improves by more than ``min_delta`` in ``direction``. NaN is never better.

    Attributes:
        metric: The metric that has to improve; null in the configuration: the run does not end early.
        direction: Whether a smaller (min) or a larger (max) metric is better.
        patience: Evaluations without an improvement after which the run ends.
        min_delta: Least difference that counts as an improvement.
    """

    metric: Annotated[str, Key(default=None)]
    direction: Literal["min", "max"] = "min"
    patience: Annotated[int, COUNT, LARGEST] = 3
    min_delta: Annotated[float, Range(least=0)] = 0.0

    def reason(self, evaluations: Evaluations) -> str | None:
        """Return why the run ends after these evaluations; None: it continues.

        Raises:
            ConfigError: the last evaluation has no metric of this name.
        """
        if evaluations:
            value_of(evaluations[-1][1], self.metric, key="early_stopping.metric")
        best, best_step, waited = float("inf"), 0, 0
        sign = -1 if self.direction == "max" else 1
        for step, metrics in evaluations:
            value = sign * metrics.get(self.metric, float("nan"))
            if value + self.min_delta < best:
                best, best_step, waited = value, step, 0
            else:
                waited += 1
            if waited >= self.patience:
                return self._explained(sign * best, best_step, waited)
        return None

    def _explained(self, best: float, step: int, waited: int) -> str:
        count = f"{waited} evaluation{'s' if waited > 1 else ''}"
        if not step:
            return f"{self.metric} was no number in {count}"
        least = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return f"{self.metric} has not improved{least} in {count} on {best:.4g} of step {step}"


def value_of(metrics: Mapping[str, float], name: str, *, key: str) -> float:
    """Return the metric ``name``, which ``key`` of the configuration names, of an evaluation.

    Raises:
        ConfigError: the evaluation has no metric of this name.
    """
    if name not in metrics:
        raise ConfigError(f"{key}={name}: the evaluation has no metric {name!r}{neighbours(name, metrics)}")
    return metrics[name]
