"""Configuration sections of modules that import torch, kept here so that composing does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, final

from worldsize.core.limits import COUNT, LARGEST, Key, Range
from worldsize.errors import ConfigError


@dataclass(frozen=True)
class ShuffleConfig:
    """Options of :class:`worldsize.data.permutation.Shuffle`.

    Attributes:
        enabled: Whether to shuffle samples; otherwise they keep the order of the data.
        block: Number of consecutive samples that stay close together, for slow storage; 1: shuffle all samples freely.
        window: Number of blocks whose samples are mixed.
    """

    enabled: bool = True
    block: Annotated[int, COUNT, LARGEST] = 1
    window: Annotated[int, COUNT, LARGEST] = 64


@final
@dataclass(frozen=True)
class WeightAverage:
    """Exponential moving average (EMA) of the weights: average ← decay · average + (1 - decay) · weights.

    The average is evaluated and saved together with the weights; see :mod:`worldsize.loop.averaging`.

    Attributes:
        decay: Decay factor, 0 to 1; null in the configuration: do not average.
        every: Number of steps between two updates of the average, not counting skipped steps.
        warmup: Whether to limit the decay of the n-th update (n from 0) to (1 + n) / (10 + n), so that the average
            soon forgets the initial weights. Source: TensorFlow's ExponentialMovingAverage.
    """

    decay: Annotated[float, Range(least=0, most=1, hint="0.999 is typical; null disables averaging"), Key(default=None)]
    every: Annotated[int, COUNT, LARGEST] = 1
    warmup: bool = False

    def __post_init__(self) -> None:
        if self.decay >= 1 and not self.warmup:
            raise ConfigError(
                f"ema.decay={self.decay} never updates the average. Set a value below 1, e.g. ema.decay=0.999, or "
                "ema.decay=null to disable averaging."
            )

    def decay_after(self, averagings: int) -> float:
        """Return the decay factor for the next update of the average, after ``averagings`` updates."""
        return min(self.decay, (1 + averagings) / (10 + averagings)) if self.warmup else self.decay
