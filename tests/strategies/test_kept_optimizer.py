"""A recipe may keep its optimizer, for example to read the learning rate in a loss: the same one trains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from worldsize.core import RunContext, World
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.zero import ZeRO
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds


class Derived(SGD):
    """An optimizer that is tried before it trains."""


@dataclass(frozen=True)
class Keeping(Chain):
    """Keeps its optimizer."""

    made: list[Optimizer] = field(default_factory=list)

    def optimizer(self, model: nn.Module) -> Optimizer:
        self.made.append(Derived(model.parameters(), lr=0.1))
        return self.made[-1]


def test_the_optimizer_that_trains_is_made_last() -> None:
    def are_last(world: World) -> list[bool]:
        return [is_last(strategy, world) for strategy in (FSDP(), ZeRO(), Mesh(tensor=2))]

    def is_last(strategy: Any, world: World) -> bool:
        recipe = Keeping()
        replica: Any = strategy.replica(recipe, RunContext(world))
        return replica.optimizer is recipe.made[-1]

    assert run_in_worlds(are_last, 2) == [[True] * 3] * 2
