"""Configuration sections of modules that import torch.

They are defined here so that composing a configuration does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, final

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
class IntegrityConfig:
    """Detection of wrong results of a processor or memory, by processes that compute or hold the same bits.

    Attributes:
        audit: Fraction of the steps, drawn from the seed, in which each process also computes its neighbor's logical
            ranks and compares the bits of losses, gradients and buffers; requires ``reproducibility=elastic``.
        replicas: Steps between two comparisons of the weights, optimizer state and buffers that several processes
            hold; 0: never.
        on_mismatch: "stop" ends the run; "heal" ends the processes on the host with the wrong bits (only the faulty
            one if there are no other hosts) and repeats the step, which requires ``strategy.on_failure=heal``; "warn"
            reports the mismatch and continues.
    """

    audit: Annotated[float, Range(least=0, most=1, hint="0.02 audits 2 % of the steps")] = 0.0
    replicas: Annotated[int, Range(least=0, hint="0 means never"), LARGEST] = 0
    on_mismatch: Literal["stop", "heal", "warn"] = "stop"


@final
@dataclass(frozen=True)
class WeightAverage:
    """Exponential moving average (EMA) of the weights.

    Update rule: average ← decay · average + (1 - decay) · weights. The average is evaluated and saved together with the
    weights; see :mod:`worldsize.loop.averaging`.

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
