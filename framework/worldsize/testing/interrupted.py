"""Ends a step at named points before its update, as a lost peer does, and compares the state with that of its start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from worldsize.checkpoint.tree import split
from worldsize.core import BufferRule, FaultPoints, MicroBatch, Recipe, Replica, RunContext, Strategy
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, logical_ranks_of
from worldsize.testing.recipes import Chain

_IN_PASSES = ("step:forward", "step:backward", "step:reduce")
POINTS = (*_IN_PASSES, "step:reduced", "before the update")


class InterruptedError(Exception):
    """The step ends here."""


class Counting(nn.Module):
    """Counts its passes in a buffer of integers, and passes its input on."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden``, of any shape."""
        self.calls += 1
        return hidden


@dataclass(frozen=True)
class CountingChain(Chain):
    """A :class:`Chain` that counts passes and, unless it is ``whole_numbers`` alone, normalizes by batch statistics."""

    whole_numbers: bool = False

    def buffers(self, model: nn.Module) -> Mapping[str, BufferRule]:
        """Declare the counter: a step counts once."""
        return {"*.calls": "equal"}

    def model(self) -> nn.Module:
        """Return the chain with a counter and perhaps BatchNorm after its first layer."""
        first, *others = super().model().children()
        own = [Counting()] if self.whole_numbers else [nn.BatchNorm1d(16), Counting()]
        return nn.Sequential(first, *own, *others)


@final
@dataclass
class Interruption(FaultPoints):
    """Raises once when ``point`` is reached after :meth:`begin`."""

    point: str
    _left: int = 0

    def begin(self, batches: int) -> None:
        """Interrupt the next step, of ``batches`` micro-batches: in the second one, if it has several."""
        self._left = 2 if batches > 1 and self.point in _IN_PASSES else 1

    def enter(self, step: int) -> None: ...

    def at(self, point: str) -> None:
        if point == self.point and self._left > 0:
            self._left -= 1
            if self._left == 0:
                raise InterruptedError(point)

    def before_update(self, losses: Sequence[Tensor], metrics: Mapping[str, Tensor]) -> None:
        self.at("before the update")


def changed_by_interruption(strategy: Strategy, context: RunContext, cases: Sequence[tuple[Recipe, int]]) -> list[str]:
    """Interrupt steps of each recipe with so many logical ranks; return the tensors that are not as they were then.

    All ranks must call it and have equally many logical ranks; if these are several, the second one is interrupted.
    """
    return [each for recipe, total in cases for each in _changed(strategy, context, recipe, total)]


def _changed(strategy: Strategy, context: RunContext, recipe: Recipe, logical_ranks: int) -> list[str]:
    """Interrupt the second step of a new replica at each of ``POINTS``, and one that follows a load."""
    changed = []
    for point, loads in [*((each, False) for each in POINTS), ("step:reduce", True)]:
        faults = Interruption(point)
        own = replace(context, faults=faults, before_update=faults.before_update, logical_ranks=logical_ranks)
        replica = strategy.replica(recipe, own)
        first, second = _batches(recipe, context, logical_ranks, replica)
        replica.step(first)
        if loads:
            replica.load(replica.state())
        before = {name: tensor.clone() for name, tensor in split(replica.state())[0].items()}
        faults.begin(1 if loads else len(second))
        if _completes(lambda: replica.step(second)):  # noqa: B023 - it is called at once
            changed.append(f"{point}: it is not reached")
        after = split(replica.state())[0]
        changed += [
            f"{point}{' after a load' * loads}: {name}" for name in before if not torch.equal(before[name], after[name])
        ]
    return changed


def _completes(action: Callable[[], object]) -> bool:
    try:
        action()
    except InterruptedError:
        return False
    return True


def _batches(recipe: Recipe, context: RunContext, logical_ranks: int, replica: Replica) -> list[list[MicroBatch]]:
    world = context.world
    own = logical_ranks_of(world.rank, world.size, logical_ranks, replica.dealing)
    drawn = micro_batches(recipe.data("train"), Order(3, 24, logical_ranks, own), world.device)
    return [next(drawn), next(drawn)]
