"""Train with interrupted, repeated and resumed steps, to compare with uninterrupted runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from worldsize.checkpoint.manifest_tree import join_tensors, split_tensors
from worldsize.collectives.gather_full import gather_full
from worldsize.collectives.per_rank import get_local_shard
from worldsize.core import BufferRule, FaultPoints, MicroBatch, Recipe, Replica, RunContext, Strategy, TensorStyle
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.loop.fit import TrainingProgress
from worldsize.testing.loops import Loop
from worldsize.testing.recipes import Chain
from worldsize.testing.training import ALONE, BATCH, SEED, create_cluster
from worldsize.worker.step_memory import SharedStep, StepMemory

_IN_PASSES = ("step:forward", "step:backward", "step:reduce")
POINTS = (*_IN_PASSES, "step:reduced", "before the update")


class StepInterruptedError(Exception):
    """Raised by :class:`FailurePoint` to interrupt a step."""


class Counting(nn.Module):
    """Identity module that counts its forward passes in an integer buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden`` unchanged."""
        self.calls += 1
        return hidden


@dataclass(frozen=True)
class CountingChain(Chain):
    """A :class:`Chain` that counts passes and, unless ``whole_numbers``, has a batch norm."""

    whole_numbers: bool = False

    def buffers(self, model: nn.Module) -> Mapping[str, BufferRule]:
        """Declare that the counter is equal on all ranks."""
        return {"*.calls": "equal"}

    def model(self) -> nn.Module:
        """Insert a counter, and BatchNorm unless ``whole_numbers``, after the first layer."""
        first, *others = super().model().children()
        own = [Counting()] if self.whole_numbers else [nn.BatchNorm1d(16), Counting()]
        return nn.Sequential(first, *own, *others)


@final
@dataclass
class FailurePoint(FaultPoints):
    """Raises once when ``point`` is reached after :meth:`arm_failure`."""

    point: str
    _left: int = 0

    def arm_failure(self, batches: int) -> None:
        """Interrupt the next step, which has ``batches`` micro-batches, in the second one if possible."""
        self._left = 2 if batches > 1 and self.point in _IN_PASSES else 1

    def report_step(self, step: int) -> None: ...

    def report_point(self, point: str) -> None:
        if point == self.point and self._left > 0:
            self._left -= 1
            if self._left == 0:
                raise StepInterruptedError(point)

    def interrupt_update(self, losses: Sequence[Tensor], metrics: Mapping[str, Tensor]) -> None:
        self.report_point("before the update")


def find_interruption_changes(
    strategy: Strategy, context: RunContext, cases: Sequence[tuple[Recipe, int]]
) -> list[str]:
    """Interrupt steps of each (recipe, logical ranks) case; return changed tensors and unreached points, as text.

    All ranks must call it with the same cases, and own the same number of logical ranks.
    """
    return [each for recipe, total in cases for each in _find_case_changes(strategy, context, recipe, total)]


def _find_case_changes(strategy: Strategy, context: RunContext, recipe: Recipe, logical_ranks: int) -> list[str]:
    """Interrupt step 2 of a new replica at each of ``POINTS``, and once after a load."""
    changed = []
    for point, loads in [*((each, False) for each in POINTS), ("step:reduce", True)]:
        faults = FailurePoint(point)
        own = replace(context, faults=faults, before_update=faults.interrupt_update, logical_ranks=logical_ranks)
        replica = strategy.replica(recipe, own)
        first, second = _draw_batches(recipe, context, logical_ranks, replica)
        replica.step(first)
        if loads:
            replica.load(replica.state())
        before = {name: tensor.clone() for name, tensor in split_tensors(replica.state())[0].items()}
        faults.arm_failure(1 if loads else len(second))
        if _completes(lambda: replica.step(second)):  # noqa: B023 - called immediately
            changed.append(f"{point}: not reached")
        after = split_tensors(replica.state())[0]
        changed += [
            f"{point}{' after a load' * loads}: {name}" for name in before if not torch.equal(before[name], after[name])
        ]
    return changed


def _completes(action: Callable[[], object]) -> bool:
    try:
        action()
    except StepInterruptedError:
        return False
    return True


def _draw_batches(recipe: Recipe, context: RunContext, logical_ranks: int, replica: Replica) -> list[list[MicroBatch]]:
    world = context.world
    own = assign_logical_ranks(world.rank, world.size, logical_ranks, replica.dealing)
    drawn = micro_batches(recipe.data("train"), Order(3, 24, logical_ranks, own), world.device)
    return [next(drawn), next(drawn)]


REMEMBERED_STEPS, _REPEATED = 6, 4


@dataclass(frozen=True)
class Remembered(Loop):
    """Recipe with state: weights each logical rank's loss by a moving average of its inputs."""

    remembers: ClassVar[bool] = True
    averages: dict[int, float] = field(default_factory=dict, compare=False)

    def state(self, logical_rank: int) -> Mapping[str, float]:
        """Return the moving average of a logical rank."""
        return {"average": self.averages.get(logical_rank, 0.0)}

    def load_state(self, logical_rank: int, state: Mapping[str, float]) -> None:
        """Set the moving average of a logical rank."""
        self.averages[logical_rank] = state["average"]

    def micro_batch_loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Return the mean squared error of a micro-batch, a scalar, weighted by the average."""
        rank = batch.logical_rank
        self.averages[rank] = average = 0.5 * self.averages.get(rank, 0.0) + float(batch.data[0].abs().mean())
        return self.loss(model, batch.data) * (1 + average)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        """Shard both layers for tensor parallelism."""
        return {"0": "column", "2": "row"}

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return all layers, in order."""
        return list(model.children())

    def model_inputs(self, batch: Any) -> tuple[Any, ...]:
        """Return the inputs, a tensor (batch, 4)."""
        return (batch[0],)


def train_healing(strategy: Strategy, context: RunContext, *, logical_ranks: int) -> Mapping[str, Mapping[str, Tensor]]:
    """Interrupt and repeat a step at each of ``POINTS``; return weights by point and name.

    All ranks must call it; weights are empty except on rank 0.
    """
    own = replace(context, logical_ranks=logical_ranks)
    return {point: _Survivor(strategy, own, point).train() for point in POINTS}


def remembering_loop(logical_ranks: int) -> Mapping[str, Tensor]:
    """Train in plain PyTorch, one logical rank after another, and return the weights by name."""
    recipe = Remembered()
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    order = Order(SEED, BATCH, logical_ranks, tuple(range(logical_ranks)))
    for batches in islice(micro_batches(recipe.data("train"), order, ALONE.device), REMEMBERED_STEPS):
        optimizer.zero_grad()
        for batch in batches:
            (recipe.micro_batch_loss(model, batch) / logical_ranks).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    weights: Mapping[str, Tensor] = model.state_dict()
    return weights


@final
class _Survivor:
    """Trains like a survivor that repeats a step interrupted at ``point``.

    It continues with its own state or, if the state is sharded, with a copy from before the step.
    """

    def __init__(self, strategy: Strategy, context: RunContext, point: str) -> None:
        self._strategy, self._recipe, self._faults = strategy, Remembered(), FailurePoint(point)
        self._context = replace(context, faults=self._faults, before_update=self._share_step)
        self._replica = self._create_replica()
        world, parts = context.world, strategy.data_parallel(create_cluster(context.world.size))
        part, total = strategy.data_rank(world), context.logical_ranks
        self._order = Order(SEED, BATCH, total, assign_logical_ranks(part, parts, total, self._replica.dealing))
        self._memory = StepMemory(self._recipe, world, replace(world, rank=part, size=parts), self._order)
        self._shared: SharedStep | None = None

    def train(self) -> Mapping[str, Tensor]:
        """Train, and return the final weights."""
        world = self._context.world
        done, state = self._memory.restore_or_share(TrainingProgress()), _Copy(self._replica)
        drawn = micro_batches(self._recipe.data("train"), self._order, world.device)
        for step, batches in enumerate(islice(drawn, REMEMBERED_STEPS), 1):
            if step == _REPEATED:
                self._interrupt(batches)
                state = state if self._strategy.shards_state else _Copy(self._replica)
                self._replica = self._create_replica()  # a gang creates new replicas when its members change
                state.load_into(self._replica)
                done = self._memory.restore_or_share(done)
            self._replica.step(batches)
            self._memory.check_shared()
            done, state = TrainingProgress(step, shared=self._shared), _Copy(self._replica)
        weights = gather_full(self._replica.state()["model"], world)
        self._replica.close(complete=True)
        return {name: tensor.clone() for name, tensor in weights.items()}

    def _create_replica(self) -> Replica:
        return self._strategy.replica(self._recipe, self._context)

    def _interrupt(self, batches: Sequence[MicroBatch]) -> None:
        self._faults.arm_failure(len(batches))
        try:
            self._replica.step(batches)
        except StepInterruptedError:
            return
        raise AssertionError(f"{self._faults.point} was not reached")

    def _share_step(self, losses: Sequence[Tensor], metrics: Mapping[str, Tensor]) -> None:
        self._shared = self._memory.share_step({})
        self._faults.interrupt_update(losses, metrics)


@final
class _Copy:
    """A copy of a replica's state, like the in-memory copies that gang members keep for peers."""

    def __init__(self, replica: Replica) -> None:
        tensors, self._values = split_tensors(replica.state())
        self._parts = {name: get_local_shard(tensor).clone() for name, tensor in tensors.items()}

    def load_into(self, replica: Replica) -> None:
        """Load the copy into a new replica with the same shards."""
        tensors, _ = split_tensors(replica.state())
        for name, tensor in tensors.items():
            get_local_shard(tensor).copy_(self._parts[name])
        replica.load(join_tensors(self._values, tensors))
