"""Streaming DiLoCo: synchronize fragments in turn, in the background, in 4-bit floats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, final

from torch import Tensor, nn

from plugins.streaming_diloco.e3m0 import BLOCK
from plugins.streaming_diloco.exchange import Gathered, Scattered
from worldsize.core import Cluster, ConfigError, Cost, Range, Recipe, Workload, World
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
from worldsize.strategies.periodic_exchange import Exact, Exchange, Fragment
from worldsize.strategies.train_state import TrainState

_EXCHANGES: dict[str, type[Exchange]] = {"fp32": Exact, "e3m0_gather": Gathered, "e3m0_scatter": Scattered}


@final
@dataclass(frozen=True)
class StreamingDiLoCo(PeriodicSyncStrategy):
    """Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512, algorithm 2).

    The fragments take turns within ``inner_steps`` steps. Each has ``fragment_blocks`` of the recipe's blocks, strided
    (block i is in fragment i mod the number of fragments); the last one has all other parameters. Outer gradients are
    sent while training continues. The outer step follows ``delay`` steps later: a worker's parameters become ``mix`` ×
    its own + (1 − mix) × the result. Buffers are averaged in float32 with the last fragment.

    ``wire``: "fp32"; "e3m0_gather": four bits, all-gather, rounded once; "e3m0_scatter": four bits in both directions,
    rounded twice, fewer bytes with three or more workers.
    """

    inner_steps: Annotated[int, Range(least=1)] = 100
    outer_lr: OuterRate = 0.4
    outer_momentum: OuterMomentum = 0.9
    fragment_blocks: Annotated[int, Range(least=1)] = 3
    delay: Annotated[int, Range(least=0)] = 1
    mix: Annotated[float, Range(least=0, below=1, hint="with 1, workers never synchronize")] = 0.0
    wire: Literal["fp32", "e3m0_gather", "e3m0_scatter"] = "e3m0_scatter"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay >= self.inner_steps:
            raise ConfigError(
                f"strategy.delay={self.delay} must be less than strategy.inner_steps={self.inner_steps}: a fragment "
                "must be received before it is sent again. Decrease strategy.delay, or increase strategy.inner_steps."
            )

    def cost(self, work: Workload, cluster: Cluster) -> Cost:
        """Return local SGD's cost plus memory for synchronized parameters, momentum and outer gradients in flight.

        Communication overlaps with training until the outer step.
        """
        averaging = averaging_cost(work, cluster, every=self.inner_steps)
        smaller = 1.0 if self.wire == "fp32" else (1 / 2 + 1 / BLOCK) / 4  # relative to four bytes
        gathered = cluster.processes / 2 if self.wire == "e3m0_gather" else 1.0
        return Cost(
            memory_bytes=averaging.memory_bytes + 3 * work.parameter_bytes,
            sent_bytes=averaging.sent_bytes * smaller * gathered,
            across_bytes=averaging.across_bytes * smaller * gathered,
            communication_seconds=averaging.communication_seconds * smaller * gathered,
            same=False,
        )

    def outer(self, recipe: Recipe, train_state: TrainState, world: World) -> OuterOptimizer:
        parts = partition(train_state.model, recipe.blocks(train_state.model), self.fragment_blocks)
        offsets = [place * self.inner_steps // len(parts) for place in range(len(parts))]
        exchange = _EXCHANGES[self.wire](world)
        fragments = [Fragment(part, exchange, lr=self.outer_lr, momentum=self.outer_momentum) for part in parts]
        if buffers := find_averaged_buffers(train_state.model):
            fragments.append(Fragment(buffers, Exact(world), lr=1.0, momentum=0.0))
            offsets.append(offsets[-1])
        return Rounds(fragments, offsets, inner_steps=self.inner_steps, delay=self.delay, mix=self.mix)


def partition(model: nn.Module, blocks: Sequence[nn.Module], each: int) -> list[list[Tensor]]:
    """Partition the trained parameters into fragments of ``each`` blocks; the rest come last.

    A parameter shared by several blocks belongs to the first one.
    """
    count = -(-len(blocks) // each)
    left = {id(parameter): parameter for parameter in find_trained_parameters(model)}
    fragments: list[list[Tensor]] = [[] for _ in range(count)]
    for place, block in enumerate(blocks):
        fragments[place % count] += [
            left.pop(id(parameter)) for parameter in block.parameters() if id(parameter) in left
        ]
    return [fragment for fragment in (*fragments, list(left.values())) if fragment]
