"""Reports the metric ``sweep.metric`` of each run to a hyperparameter search, such as Optuna's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, final

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from worldsize.config.schema import SweepConfig
from worldsize.config.section import build_section_schema
from worldsize.core import metric_key, parse_metric_key
from worldsize.core.limits import check_limits
from worldsize.errors import ConfigError, WorldsizeError, neighbours


@final
@dataclass(frozen=True)
class Trial:
    """Outcome of a run.

    Attributes:
        exit_code: Exit code of the run.
        value: Objective value for a sweep; None if no value is needed or the run did not complete.
        why: Reason for the failure, in one line.
        folder: Run folder; None if no process was started.
    """

    exit_code: int
    value: float | None = None
    why: str = ""
    folder: Path | None = None


@final
class TrialFailedError(Exception):
    """A run of a search did not produce a value. The sweeper counts it as failed, and continues if so configured."""


@final
class SweepEnded(BaseException):  # a sweeper would catch and count an Exception
    """Ends a sweep immediately, since Hydra and its plugins do not catch it; ``error`` is shown unless None."""

    def __init__(self, error: WorldsizeError | None = None) -> None:
        super().__init__(error)
        self.error = error


@final
class SweepEnd:
    """Placeholder result of the run that ends a sweep while others still run in parallel.

    Converting it to a number, which happens once all runs have ended, raises SweepEnded.
    """

    def __float__(self) -> float:
        raise SweepEnded


@final
class ObjectiveCheck(Callback):
    """Passes ``sweep.direction`` to the sweeper before its creation, and refuses a search without a metric."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Raise SweepEnded if a search lacks a metric, or if the runs of a search do not train."""
        if "direction" not in config.hydra.sweeper:
            return
        try:
            _check_search(config)
            config.hydra.sweeper.direction = _direction(config.sweep, config.hydra.sweeper)
        except ConfigError as error:
            raise SweepEnded(error) from None


def _check_search(config: DictConfig) -> None:
    check_limits(build_section_schema(SweepConfig), config.sweep, key="sweep")
    name = f"hydra/sweeper={config.hydra.runtime.choices['hydra/sweeper']}"
    if config.sweep.metric is None:
        raise ConfigError(
            f"{name} requires sweep.metric. Set sweep.metric to a name in metrics.jsonl, e.g. sweep.metric=loss."
        )
    if config.launch != "run":
        raise ConfigError(
            f"{name} requires training, but launch={config.launch} does not train. Remove launch={config.launch}."
        )


def _direction(sweep: DictConfig, sweeper: DictConfig) -> str:
    """Return the direction set in ``sweep``, or else in the sweeper (an Enum value is the sweeper's default).

    Raises:
        ConfigError: the two contradict each other, or the sweeper has several directions.
    """
    own = sweeper.direction
    if OmegaConf.is_list(own):
        raise ConfigError(
            "hydra.sweeper.direction is a list, but sweep.metric is a single metric. Set sweep.direction."
        )
    usual = own.name if isinstance(own, Enum) else str(own)
    if sweep.direction is None:
        return usual
    if not isinstance(own, Enum) and usual != sweep.direction:
        raise ConfigError(
            f"sweep.direction={sweep.direction} contradicts hydra.sweeper.direction={usual}. Set only one of them."
        )
    return str(sweep.direction)


def is_search() -> bool:
    """Return whether the run is part of a sweep whose sweeper optimizes a metric, unlike a plain grid."""
    hydra = HydraConfig.get()
    return str(hydra.mode).endswith("MULTIRUN") and "direction" in hydra.sweeper


def maximizes(sweep: DictConfig) -> bool:
    """Return whether larger metric values are better, according to the sweep or its sweeper."""
    own = HydraConfig.get().sweeper.get("direction")
    return "maximize" in (sweep.direction, own.name if isinstance(own, Enum) else own)


def compute_objective(sweep: DictConfig, metrics: Mapping[str, float]) -> float:
    """Return the value of ``sweep.metric``; in a search, NaN becomes the worst value for its direction.

    Raises:
        SweepEnded: the metric does not exist in this run, and therefore in none.
    """
    key = metric_key(*parse_metric_key(sweep.metric))
    if key not in metrics:
        text = f"sweep.metric={sweep.metric}: metric {key!r} not found in the evaluation{neighbours(key, metrics)}"
        raise SweepEnded(ConfigError(text))
    value = float(metrics[key])
    if not math.isnan(value) or not is_search():
        return value
    return math.inf if _direction(sweep, HydraConfig.get().sweeper) == "minimize" else -math.inf
