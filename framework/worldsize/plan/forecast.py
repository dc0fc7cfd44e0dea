"""Predicted steps of a strategy: from what its communication costs and what the step computes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from worldsize.core import Cost, Workload
from worldsize.dist.cost.collectives import compute_seconds_for, exposed_seconds


@dataclass(frozen=True)
class Forecast:
    """``compute_seconds`` is what a rank computes of the workload in a step, without what the strategy adds to it;
    ``step_seconds`` how long a step takes, ``exposed_seconds`` how long of it a rank waits for communication.
    ``by_formula`` says why the memory is what the strategy says of itself, which estimates activations; None: it was
    rehearsed, or the size of the model was given.
    """

    cost: Cost
    compute_seconds: float
    exposed_seconds: float
    step_seconds: float
    by_formula: str | None = None

    @property
    def efficiency(self) -> float:
        """Fraction of a step that is compute, 0 to 1."""
        return self.compute_seconds / self.step_seconds if self.step_seconds else 1.0

    @property
    def added_seconds(self) -> float:
        """Seconds of a step in which a rank computes what the strategy adds to the model, such as encoding."""
        computed = (self.step_seconds - self.exposed_seconds) * (1 - self.cost.idle)
        return max(0.0, computed - self.compute_seconds)

    def compute_seconds_for(self, wanted: float) -> float:
        """Return the compute seconds of a step at which its efficiency is ``wanted``, if what is lost stays.

        Infinite: a rank is idle for a larger share of the time, whatever it computes.
        """
        busy = 1 - self.cost.idle
        if wanted >= busy:
            return math.inf
        return compute_seconds_for(wanted / busy, self.added_seconds + busy * self.exposed_seconds)


def forecast(cost: Cost, work: Workload, computed: float | None = None) -> Forecast:
    """Predict a step.

    A rank is idle for its share of the compute; communication that hides behind compute is not waited for.
    """
    if computed is None:
        computed = work.compute_seconds + cost.added_seconds
    exposed = cost.exposed_seconds
    if exposed is None:
        exposed = exposed_seconds(cost.communication_seconds, work.overlap * work.compute_seconds)
    step = computed / (1 - cost.idle) + exposed
    return Forecast(cost, min(work.compute_seconds, computed), exposed, step)


def accumulated(work: Workload, micro_batches: float) -> Workload:
    """Return ``work``, of one micro-batch, for ``micro_batches`` of them in a step: one update, and communication hides
    behind the last one only. Fewer than one: the rank has a part of the model.
    """
    once = work.update_seconds * min(1.0, micro_batches)
    seconds = (work.compute_seconds - work.update_seconds) * micro_batches + once
    hidden = work.overlap * work.compute_seconds * min(1.0, micro_batches)
    overlap = hidden / seconds if seconds else work.overlap
    return replace(work, compute_seconds=seconds, update_seconds=once, overlap=overlap)
