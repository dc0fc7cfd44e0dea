"""Sections of the configuration whose owners import torch; composing a configuration does not wait for that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, final

from worldsize.core.limits import COUNT, LARGEST, Key, Range
from worldsize.errors import ConfigError


@dataclass(frozen=True)
class ShuffleConfig:
    """How far a sample may move from its neighbours in one epoch, see :class:`worldsize.data.permutation.Shuffle`.

    Attributes:
        enabled: Whether samples are shuffled; otherwise they keep the order of the data.
        block: Samples that are neighbours in the data and stay close, for slow storage; 1: each goes anywhere.
        window: Blocks whose samples are mixed.
    """

    enabled: bool = True
    block: Annotated[int, COUNT, LARGEST] = 1
    window: Annotated[int, COUNT, LARGEST] = 64


@final
@dataclass(frozen=True)
class WeightAverage:
    """An exponential moving average: after a step, average ← decay · average + (1 - decay) · weights.

    It is evaluated and saved beside the weights, see :mod:`worldsize.train.averaging`.

    Attributes:
        decay: Factor of the average in each averaging, 0 to 1; null in the configuration: there is no average.
        every: Number of steps between two averagings, not counting skipped steps.
        warmup: Whether to limit the decay of the n-th averaging (n from 0) to (1 + n) / (10 + n), so that the average
            soon forgets the first weights. Source: TensorFlow's ExponentialMovingAverage.
    """

    decay: Annotated[float, Range(least=0, most=1, hint="0.999 is usual; null: no average"), Key(default=None)]
    every: Annotated[int, COUNT, LARGEST] = 1
    warmup: bool = False

    def __post_init__(self) -> None:
        if self.decay >= 1 and not self.warmup:
            raise ConfigError(
                f"ema.decay={self.decay} never averages: the average stays at its first weights. Set "
                "ema.decay=0.999 or another number below 1, or ema.decay=null for no average."
            )

    def decay_after(self, averagings: int) -> float:
        """Return the decay factor of the next averaging, after ``averagings`` earlier ones."""
        return min(self.decay, (1 + averagings) / (10 + averagings)) if self.warmup else self.decay
