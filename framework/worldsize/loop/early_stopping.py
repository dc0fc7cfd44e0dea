"""Early stopping as a pure function of evaluations, with equal results on all ranks."""

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
    """Ends a run after ``patience`` evaluations in a row without improvement of ``metric``.

    An improvement must exceed ``min_delta`` in ``direction``. NaN is never an improvement.

    Attributes:
        metric: The metric that must improve; null in the configuration disables early stopping.
        direction: Whether smaller (min) or larger (max) values are better.
        patience: Number of evaluations without improvement before the run ends.
        min_delta: Difference that an improvement must exceed.
    """

    metric: Annotated[str, Key(default=None)]
    direction: Literal["min", "max"] = "min"
    patience: Annotated[int, COUNT, LARGEST] = 3
    min_delta: Annotated[float, Range(least=0)] = 0.0

    def find_stop_reason(self, evaluations: Evaluations) -> str | None:
        """Return why the run ends after these evaluations, or None if it continues.

        Raises:
            ConfigError: the last evaluation lacks the metric.
        """
        if evaluations:
            get_metric_value(evaluations[-1][1], self.metric, key="early_stopping.metric")
        best, best_step, waited = float("inf"), 0, 0
        sign = -1 if self.direction == "max" else 1
        for step, metrics in evaluations:
            value = sign * metrics.get(self.metric, float("nan"))
            if value + self.min_delta < best:
                best, best_step, waited = value, step, 0
            else:
                waited += 1
            if waited >= self.patience:
                return self._format_reason(sign * best, best_step, waited)
        return None

    def _format_reason(self, best: float, step: int, waited: int) -> str:
        count = f"{waited} evaluation{'s' if waited > 1 else ''}"
        if not step:
            return f"{self.metric} was not finite in {count}"
        least = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return f"{self.metric} has not improved on {best:.4g} (step {step}){least} in {count}"


def get_metric_value(metrics: Mapping[str, float], name: str, *, key: str) -> float:
    """Return the metric ``name`` of an evaluation.

    ``key``: the configuration key with this name, for errors.

    Raises:
        ConfigError: the evaluation lacks the metric.
    """
    if name not in metrics:
        raise ConfigError(f"{key}={name}: metric {name!r} not found in the evaluation{neighbours(name, metrics)}")
    return metrics[name]
