"""DiLoCo: many local steps per worker, then one outer step on all workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, final

from worldsize.core import Cluster, Cost, Range, Recipe, Workload, World
from worldsize.strategies.periodic import (
    OuterMomentum,
    OuterOptimizer,
    OuterRate,
    PeriodicSyncStrategy,
    Rounds,
    averaging_cost,
    find_averaged_buffers,
    find_trained_parameters,
)
from worldsize.strategies.periodic_exchange import Exact, Fragment
from worldsize.strategies.train_state import TrainState


@final
@dataclass(frozen=True)
class DiLoCo(PeriodicSyncStrategy):
    """DiLoCo (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

    Each worker takes ``inner_steps`` steps with the recipe's optimizer, whose state persists across rounds. The mean
    over workers of (parameters at the start of the round − current parameters) is the gradient of an outer step: SGD
    with Nesterov momentum, from the start of the round. The result starts the next round. Buffers are averaged.
    """

    inner_steps: Annotated[int, Range(least=1)] = 500
    outer_lr: OuterRate = 0.7
    outer_momentum: OuterMomentum = 0.9

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        """Return local SGD's cost plus memory for the round's initial parameters and the outer momentum."""
        averaging = averaging_cost(work, cluster, every=self.inner_steps)
        return replace(averaging, memory_bytes=averaging.memory_bytes + 2 * work.parameter_bytes)

    def outer(self, recipe: Recipe, train_state: TrainState, world: World) -> OuterOptimizer:
        exchange = Exact(world)
        fragments = [
            Fragment(
                find_trained_parameters(train_state.model), exchange, lr=self.outer_lr, momentum=self.outer_momentum
            )
        ]
        if buffers := find_averaged_buffers(train_state.model):
            fragments.append(Fragment(buffers, exchange, lr=1.0, momentum=0.0))
        return Rounds(fragments, [0] * len(fragments), inner_steps=self.inner_steps)
