"""A recipe that keeps values from step to step, trained through restarts and repeated steps as without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, final

from torch import Tensor, nn

from worldsize.checkpoint.tree import join, split
from worldsize.core import MicroBatch, Replica, RunContext, Strategy, TensorStyle
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, logical_ranks_of
from worldsize.dist.gather_full import gather_full
from worldsize.dist.per_rank import local
from worldsize.testing.interrupted import POINTS, InterruptedError, Interruption
from worldsize.testing.loops import Loop
from worldsize.testing.training import ALONE, BATCH, SEED, cluster_of
from worldsize.train.fit import TrainingProgress
from worldsize.worker.step_memory import SharedStep, StepMemory

REMEMBERED_STEPS, _REPEATED = 6, 4


@dataclass(frozen=True)
class Remembered(Loop):
    """Weighs the loss of each logical rank by a moving average of its inputs, kept in this object."""

    remembers: ClassVar[bool] = True
    averages: dict[int, float] = field(default_factory=dict, compare=False)

    def state(self, logical_rank: int) -> Mapping[str, float]:
        """Return the average of a logical rank."""
        return {"average": self.averages.get(logical_rank, 0.0)}

    def load_state(self, logical_rank: int, state: Mapping[str, float]) -> None:
        """Replace the average of a logical rank."""
        self.averages[logical_rank] = state["average"]

    def micro_batch_loss(self, model: nn.Module, batch: MicroBatch) -> Tensor:
        """Return the mean squared error of a micro-batch, a scalar, weighed by the average."""
        rank = batch.logical_rank
        self.averages[rank] = average = 0.5 * self.averages.get(rank, 0.0) + float(batch.data[0].abs().mean())
        return self.loss(model, batch.data) * (1 + average)

    def tensor_plan(self, model: nn.Module) -> Mapping[str, TensorStyle]:
        """Divide both layers."""
        return {"0": "column", "2": "row"}

    def layers(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return all layers, in order."""
        return list(model.children())

    def model_inputs(self, batch: Any) -> tuple[Any, ...]:
        """Return the inputs, a tensor (batch, 4)."""
        return (batch[0],)


def train_healing(strategy: Strategy, context: RunContext, *, logical_ranks: int) -> Mapping[str, Mapping[str, Tensor]]:
    """Train with a step that ends at a named point and is repeated; return the weights by name, by the point.

    All ranks must call it; weights are empty except on rank 0.
    """
    own = replace(context, logical_ranks=logical_ranks)
    return {point: _Healing(strategy, own, point).train() for point in POINTS}


def remembering_loop(logical_ranks: int) -> Mapping[str, Tensor]:
    """Train in plain PyTorch, one logical rank of a step after the other, and return the weights by name."""
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
class _Healing:
    """Trains as a survivor that repeats a step after its end at ``point``.

    It continues with its own state; where processes hold shards, with a copy from before the step.
    """

    def __init__(self, strategy: Strategy, context: RunContext, point: str) -> None:
        self._strategy, self._recipe, self._faults = strategy, Remembered(), Interruption(point)
        self._context = replace(context, faults=self._faults, before_update=self._before_update)
        self._replica = self._made()
        world, parts = context.world, strategy.data_parallel(cluster_of(context.world.size))
        part, total = strategy.data_rank(world), context.logical_ranks
        self._order = Order(SEED, BATCH, total, logical_ranks_of(part, parts, total, self._replica.dealing))
        self._memory = StepMemory(self._recipe, world, replace(world, rank=part, size=parts), self._order)
        self._shared: SharedStep | None = None

    def train(self) -> Mapping[str, Tensor]:
        """Return the weights at the end."""
        world = self._context.world
        done, state = self._memory.begin(TrainingProgress()), _Copy(self._replica)
        drawn = micro_batches(self._recipe.data("train"), self._order, world.device)
        for step, batches in enumerate(islice(drawn, REMEMBERED_STEPS), 1):
            if step == _REPEATED:
                self._interrupt(batches)
                state = state if self._strategy.shards_state else _Copy(self._replica)
                self._replica = self._made()  # a gang makes others when its members change
                state.load_into(self._replica)
                done = self._memory.begin(done)
            self._replica.step(batches)
            self._memory.check_shared()
            done, state = TrainingProgress(step, shared=self._shared), _Copy(self._replica)
        weights = gather_full(self._replica.state()["model"], world)
        self._replica.close(complete=True)
        return {name: tensor.clone() for name, tensor in weights.items()}

    def _made(self) -> Replica:
        return self._strategy.replica(self._recipe, self._context)

    def _interrupt(self, batches: Sequence[MicroBatch]) -> None:
        self._faults.begin(len(batches))
        try:
            self._replica.step(batches)
        except InterruptedError:
            return
        raise AssertionError(f"{self._faults.point} is not reached")

    def _before_update(self, losses: Sequence[Tensor], metrics: Mapping[str, Tensor]) -> None:
        self._shared = self._memory.share({})
        self._faults.before_update(losses, metrics)


@final
class _Copy:
    """A copy of the state of a replica, as peers of a gang keep it in memory."""

    def __init__(self, replica: Replica) -> None:
        tensors, self._values = split(replica.state())
        self._parts = {name: local(tensor).clone() for name, tensor in tensors.items()}

    def load_into(self, replica: Replica) -> None:
        """Load it into a new replica with the same parts of tensors."""
        tensors, _ = split(replica.state())
        for name, tensor in tensors.items():
            local(tensor).copy_(self._parts[name])
        replica.load(join(self._values, tensors))
