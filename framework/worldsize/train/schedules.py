"""Learning-rate schedules that torch lacks as a single object."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from worldsize.core import Range

Steps = Annotated[int, Range(least=1)]
Warmup = Annotated[float, Range(least=0, most=1, hint="it is a share of the steps")]
WarmupSteps = Annotated[int | None, Range(least=0)]
Floor = Annotated[float, Range(least=0, hint="it is a share of the peak")]


def warmup_cosine(
    optimizer: Optimizer,
    *,
    steps: Steps,
    warmup: Warmup = 0.05,
    warmup_steps: WarmupSteps = None,
    floor: Floor = 0.1,
) -> LRScheduler:
    """Return a linear warm-up to the optimizer's learning rate, then half a cosine down to ``floor`` times that rate.

    Args:
        optimizer: its learning rate is the peak.
        steps: steps of the whole run.
        warmup: fraction of ``steps`` that warms up, 0 to 1, if ``warmup_steps`` is None.
        warmup_steps: number of steps that warm up.
        floor: final learning rate, as a fraction of the peak.

    Source: SGDR, Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5, without restarts.
    """
    rising = _rising(steps, warmup, warmup_steps)

    def falling(step: int) -> float:
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * _share(step, rising, steps)))

    return _after_warmup(optimizer, rising, falling)


def warmup_linear(
    optimizer: Optimizer,
    *,
    steps: Steps,
    warmup: Warmup = 0.05,
    warmup_steps: WarmupSteps = None,
    floor: Floor = 0.0,
) -> LRScheduler:
    """Return a linear warm-up to the optimizer's learning rate, then a straight line down to ``floor`` times that rate.

    The arguments are those of :func:`warmup_cosine`. Source: BERT, Devlin et al. 2019, arXiv 1810.04805, appendix A.2.
    """
    rising = _rising(steps, warmup, warmup_steps)

    def falling(step: int) -> float:
        return floor + (1 - floor) * max(0.0, (steps - step) / max(1, steps - rising))

    return _after_warmup(optimizer, rising, falling)


def warmup_inverse_sqrt(
    optimizer: Optimizer, *, steps: Steps, warmup: Warmup = 0.05, warmup_steps: WarmupSteps = None
) -> LRScheduler:
    """Return a linear warm-up, then the peak divided by the square root of the steps, counted in warm-ups.

    It does not depend on the length of the run if ``warmup_steps`` is given, so that the run may be continued. The
    arguments are those of :func:`warmup_cosine`. Source: Vaswani et al. 2017, arXiv 1706.03762, equation 3, with the
    optimizer's learning rate as its peak.
    """
    rising = _rising(steps, warmup, warmup_steps)
    return _after_warmup(optimizer, rising, lambda step: math.sqrt(rising / (step + 1)))


def warmup_stable_decay(
    optimizer: Optimizer,
    *,
    steps: Steps,
    warmup: Warmup = 0.05,
    warmup_steps: WarmupSteps = None,
    decay: Annotated[float, Range(least=0, most=1, hint="it is a share of the steps")] = 0.2,
    shape: Literal["linear", "sqrt"] = "sqrt",
    floor: Floor = 0.0,
) -> LRScheduler:
    """Return a linear warm-up, then the peak, and down to ``floor`` times that rate in the last steps of the run.

    A run that is resumed with more steps, from a checkpoint before the decay, goes on at the peak.

    Args:
        optimizer: its learning rate is the peak.
        steps: steps of the whole run.
        warmup: fraction of ``steps`` that warms up, 0 to 1, if ``warmup_steps`` is None.
        warmup_steps: number of steps that warm up.
        decay: fraction of ``steps`` that decays, 0 to 1.
        shape: "linear", or "sqrt": 1 minus the square root of the share of the decay that is done.
        floor: final learning rate, as a fraction of the peak.

    Source: MiniCPM, Hu et al. 2024, arXiv 2404.06395, section 4; the shapes are those of Hägele et al. 2024, arXiv
    2405.18392, section 3.
    """
    rising = _rising(steps, warmup, warmup_steps)
    last = max(1, round(decay * steps))

    def falling(step: int) -> float:
        done = _share(step, steps - last, steps)
        return floor + (1 - floor) * (1 - (done if shape == "linear" else math.sqrt(done)))

    return _after_warmup(optimizer, rising, falling)


def _rising(steps: int, warmup: float, warmup_steps: int | None) -> int:
    """Return the number of steps that warm up, at least 1."""
    return max(1, round(warmup * steps) if warmup_steps is None else warmup_steps)


def _share(step: int, first: int, last: int) -> float:
    """Return how much of the way from step ``first`` to step ``last`` is done in ``step``, 0 to 1."""
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))


def _after_warmup(optimizer: Optimizer, rising: int, falling: Callable[[int], float]) -> LRScheduler:
    """Return a schedule that rises linearly in ``rising`` steps, and then has what ``falling`` says of each step."""
    return LambdaLR(optimizer, lambda step: (step + 1) / rising if step < rising else falling(step))
