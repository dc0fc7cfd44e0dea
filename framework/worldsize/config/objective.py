"""Returns the metric ``sweep.metric`` of a run to a search over configurations, such as Optuna's."""

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
from worldsize.config.section import schema_of
from worldsize.core import metric_key, split_of
from worldsize.core.limits import check_limits
from worldsize.errors import ConfigError, WorldsizeError, neighbours


@final
@dataclass(frozen=True)
class Trial:
    """The end of a run.

    Attributes:
        exit_code: Its exit code.
        value: Its value for a sweep; None if no value is needed, or the run did not complete.
        why: Why it failed, in one line.
        folder: Its folder; None: no process was started.
    """

    exit_code: int
    value: float | None = None
    why: str = ""
    folder: Path | None = None


@final
class TrialFailedError(Exception):
    """A run of a search has no value. The sweeper counts it as failed, and continues if so configured."""


@final
class SweepEnded(BaseException):  # not an Exception, which a sweeper would catch and count
    """Ends a sweep at once, since Hydra and its plugins catch every Exception; None means no error to show."""

    def __init__(self, error: WorldsizeError | None = None) -> None:
        super().__init__(error)
        self.error = error


@final
class SweepEnd:
    """The value of a run after which a sweep ends, while others still run in parallel.

    Converting it to a number raises SweepEnded, once all of them have ended.
    """

    def __float__(self) -> float:
        raise SweepEnded


@final
class ObjectiveCheck(Callback):
    """Passes ``sweep.direction`` to the sweeper before it is created, and refuses a search without a metric."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Raise SweepEnded if a sweeper that takes a direction has no metric, or its runs are not trained."""
        if "direction" not in config.hydra.sweeper:
            return
        try:
            _check_search(config)
            config.hydra.sweeper.direction = _direction(config.sweep, config.hydra.sweeper)
        except ConfigError as error:
            raise SweepEnded(error) from None


def _check_search(config: DictConfig) -> None:
    check_limits(schema_of(SweepConfig), config.sweep, key="sweep")
    name = f"hydra/sweeper={config.hydra.runtime.choices['hydra/sweeper']}"
    if config.sweep.metric is None:
        raise ConfigError(
            f"{name} searches for the best value of a metric, and none is named. "
            "Set sweep.metric=loss or another one, as metrics.jsonl names it."
        )
    if config.launch != "run":
        raise ConfigError(f"{name} needs the metric of each run, and launch={config.launch} trains none. Leave it out.")


def _direction(sweep: DictConfig, sweeper: DictConfig) -> str:
    """Return the direction that ``sweep`` and the sweeper agree on; the sweeper's default is an Enum.

    Raises:
        ConfigError: they contradict each other, or the sweeper has several.
    """
    own = sweeper.direction
    if OmegaConf.is_list(own):
        raise ConfigError("hydra.sweeper.direction is a list, and sweep.metric names one metric. Set sweep.direction.")
    usual = own.name if isinstance(own, Enum) else str(own)
    if sweep.direction is None:
        return usual
    if not isinstance(own, Enum) and usual != sweep.direction:
        raise ConfigError(
            f"sweep.direction={sweep.direction} contradicts hydra.sweeper.direction={usual}. Leave one of them out."
        )
    return str(sweep.direction)


def is_search() -> bool:
    """Return whether the run belongs to a sweep whose sweeper uses the values of runs."""
    hydra = HydraConfig.get()
    return str(hydra.mode).endswith("MULTIRUN") and "direction" in hydra.sweeper


def maximizes(sweep: DictConfig) -> bool:
    """Return whether a larger value of the metric is better, by the sweep's own direction or its sweeper's."""
    own = HydraConfig.get().sweeper.get("direction")
    return "maximize" in (sweep.direction, own.name if isinstance(own, Enum) else own)


def value_of(sweep: DictConfig, metrics: Mapping[str, float]) -> float:
    """Return the metric that ``sweep`` names; for a search, NaN becomes the worst value of its direction.

    Raises:
        SweepEnded: there is no such metric, and so none in other runs.
    """
    key = metric_key(*split_of(sweep.metric))
    if key not in metrics:
        text = f"sweep.metric={sweep.metric}: the evaluation has no metric {key!r}{neighbours(key, metrics)}"
        raise SweepEnded(ConfigError(text))
    value = float(metrics[key])
    if not math.isnan(value) or not is_search():
        return value
    return math.inf if _direction(sweep, HydraConfig.get().sweeper) == "minimize" else -math.inf
