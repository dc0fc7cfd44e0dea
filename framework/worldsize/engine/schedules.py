"""Learning-rate schedules that torch lacks as a single object."""

from __future__ import annotations

import math
from typing import Annotated

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from worldsize.core import Range


def warmup_cosine(
    optimizer: Optimizer,
    *,
    steps: Annotated[int, Range(least=1)],
    warmup: Annotated[float, Range(least=0, most=1, hint="it is a share of the steps")] = 0.05,
    warmup_steps: Annotated[int | None, Range(least=0)] = None,
    floor: Annotated[float, Range(least=0, hint="it is a share of the peak")] = 0.1,
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
    rising = max(1, round(warmup * steps) if warmup_steps is None else warmup_steps)

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        progress = min(1.0, (step - rising) / max(1, steps - rising))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
