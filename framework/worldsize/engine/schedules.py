"""Learning-rate schedules that torch does not have as one object."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


def warmup_cosine(optimizer: Optimizer, *, steps: int, warmup: float = 0.05, floor: float = 0.1) -> LRScheduler:
    """Return a linear warm-up over ``warmup × steps``, then half a cosine down to ``floor`` times the peak.

    Source: SGDR, arXiv 1608.03983, equation 5, without restarts.
    """
    rising = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        progress = min(1.0, (step - rising) / max(1, steps - rising))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)
