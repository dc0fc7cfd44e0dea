"""Predicted steps of a strategy: from what its communication costs and what the step computes."""

from __future__ import annotations

from dataclasses import dataclass

from worldsize.core import Cost, Workload
from worldsize.planning.cost import exposed_seconds


@dataclass(frozen=True)
class Forecast:
    """``compute_seconds`` is all that a rank computes in a step, ``step_seconds`` how long a step takes."""

    cost: Cost
    compute_seconds: float
    step_seconds: float

    @property
    def efficiency(self) -> float:
        """Share of a step that computes."""
        return self.compute_seconds / self.step_seconds if self.step_seconds else 1.0


def forecast(cost: Cost, work: Workload) -> Forecast:
    """A rank is idle in its share of the compute; what communication hides behind compute is not waited for."""
    busy = work.compute_seconds / (1 - cost.idle)
    exposed = exposed_seconds(cost.communication_seconds, work.overlap * work.compute_seconds)
    return Forecast(cost, work.compute_seconds, busy + exposed)
