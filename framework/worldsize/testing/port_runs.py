"""Run the two sides of a comparison: the recipe, and the loop of the original program."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.collectives.gather_full import gather_full
from worldsize.core import Batch, Dealing, MicroBatch, Numerics, Recipe, Replica, RunContext, World
from worldsize.core.sections import WeightAverage
from worldsize.data.batches import get_collate_fn
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.loop.averaging import AveragedReplica
from worldsize.seeds import derive_seed, seed_generators
from worldsize.strategies.optimizer_checks import refuse_closures
from worldsize.strategies.schedules import check_metric
from worldsize.strategies.synchronous import create_local_replica
from worldsize.strategies.train_state import TrainState

Reference = Callable[[nn.Module, Iterator[Batch]], Iterable[Any]]  # yields losses, and may return a model


@final
@dataclass(frozen=True)
class PortConfig:
    """Settings for comparing a recipe with the original program."""

    batch_size: int
    """Samples per step."""
    micro_batches: int = 1
    """Micro-batches per step, over which gradients are accumulated; ``logical_ranks`` in a run."""
    steps: int = 20
    seed: int = 0
    """Seed of the initial weights, the order of samples and dropout."""
    numerics: Numerics = field(default_factory=Numerics)
    """Precision and clipping of the recipe."""
    length_balanced: bool = False
    average: WeightAverage | None = None
    """Moving average of the recipe's weights, section ``ema`` in a run, or None."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Device for training in this process."""

    def order(self, rank: int = 0, size: int = 1, dealing: Dealing = "cyclic") -> Order:
        """Return the order of samples for process ``rank`` of ``size``."""
        mine = assign_logical_ranks(rank, size, self.micro_batches, dealing)
        return Order(self.seed, self.batch_size, self.micro_batches, mine, self.length_balanced)


@final
@dataclass(frozen=True)
class Trained:
    """The outcome of one training run.

    Attributes:
        losses: Loss of each step.
        weights: The model's state by name; empty if unknown.
        taken: Number of micro-batches consumed before each loss was yielded; empty for logged losses.
    """

    losses: Sequence[float]
    weights: Mapping[str, Tensor]
    taken: Sequence[int] = ()


def initial_model(recipe: Recipe, config: PortConfig) -> nn.Module:
    """Build the recipe's model with the initial weights of a run with the configured seed."""
    seed_generators(derive_seed(config.seed, "init"), config.device)
    return recipe.model().to(config.device)


def load_steps(recipe: Recipe, config: PortConfig, order: Order | None = None) -> Iterator[list[MicroBatch]]:
    """Yield this process's micro-batches of each step.

    Args:
        recipe: The recipe, for its data.
        config: Settings of the comparison.
        order: The order of samples for this process. None for a single process.
    """
    order, data = order or config.order(), recipe.data("train")
    return islice(micro_batches(data, order, config.device, collate=get_collate_fn(recipe)), config.steps)


def recipe_trained(recipe: Recipe, config: PortConfig) -> Trained:
    """Train ``recipe`` in a plain loop in this process.

    Raises:
        ConfigError: a plain loop cannot train it.
    """
    unused = TrainState.from_recipe(recipe, initial_model(recipe, config))
    check_metric(unused.schedules, None, metric=None)
    for optimizer in unused.optimizers:
        refuse_closures(optimizer)
    model = initial_model(recipe, config)
    context = create_run_context(World.create_single(config.device), config)
    replica: Replica = create_local_replica(recipe, model, context)
    if config.average:
        replica = AveragedReplica(replica, config.average)
    losses = [average_losses(replica.step(step).losses) for step in load_steps(recipe, config)]
    return Trained(losses, gather_weights(replica, context.world))


def create_run_context(world: World, config: PortConfig) -> RunContext:
    """Return the run context of a process in ``world``, with the settings in ``config``."""
    return RunContext(
        world, config.numerics, config.seed, config.steps, workers=world.size, logical_ranks=config.micro_batches
    )


def gather_weights(replica: Replica, world: World) -> dict[str, Tensor]:
    """Return full weights, then averages ``ema/<name>``, in model order and shapes, on rank 0."""
    state = replica.state()
    averages = state.get("ema", {}).get("weights", {})
    sharded = {**state["model"], **{f"ema/{name}": average for name, average in averages.items()}}
    full = gather_full(sharded, world)
    return copy_to_cpu({name: full[name] for name in sharded if name in full})


def average_losses(losses: Sequence[Tensor] | Sequence[float]) -> float:
    """Return the mean of a step's losses, each a scalar."""
    return math.fsum(map(float, losses)) / len(losses)


def copy_to_cpu(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return copies on the CPU of the tensors in a state_dict, omitting other values."""
    return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}


@final
class Batches:
    """Iterator over the micro-batches of all steps; seeds the generators for each one."""

    def __init__(self, steps: Iterator[list[MicroBatch]], device: torch.device) -> None:
        self._flat = (batch for step in steps for batch in step)
        self._device = device
        self.taken = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = next(self._flat)
        self.taken += 1
        seed_generators(batch.seed, self._device)
        return batch.data


def reference_trained(
    recipe: Recipe,
    reference: Reference | Sequence[float],
    config: PortConfig,
    *,
    model: nn.Module | None = None,
    steps: Iterator[list[MicroBatch]] | None = None,
) -> Trained:
    """Run the original program's loop, or use its logged losses.

    Args:
        recipe: Recipe that provides the model and batches.
        reference: The loop, or the losses.
        config: Settings of the comparison.
        model: Model to pass to the loop. None for the recipe's.
        steps: Micro-batches to pass to the loop. None for the recipe's.

    Raises:
        AssertionError: there are fewer losses than steps.
    """
    if not callable(reference):
        logged = Trained([float(loss) for loss in islice(reference, config.steps)], {})
        _check_length(logged.losses, config, 0)
        return logged
    batches = Batches(steps or load_steps(recipe, config), config.device)
    start = initial_model(recipe, config) if model is None else model
    seed_generators(derive_seed(config.seed, "init"), config.device)  # the program may build its model again
    yielded, losses, taken = iter(reference(start, batches)), [], []
    returned = None
    for number in count():
        try:
            loss = next(yielded)
        except StopIteration as end:
            returned = end.value
            break
        if number == config.steps:  # a program with its own batches may yield further losses
            break
        losses.append(float(loss.detach() if isinstance(loss, Tensor) else loss))
        taken.append(batches.taken)
    _check_length(losses, config, batches.taken)
    state = returned.state_dict() if isinstance(returned, nn.Module) else returned or {}
    return Trained(losses, copy_to_cpu(state), taken)


def _check_length(losses: Sequence[float], config: PortConfig, taken: int) -> None:
    each = f" and {taken} micro-batches" if taken else ""
    assert len(losses) >= config.steps, (
        f"the reference yielded {len(losses)} losses for {config.steps} steps{each}. Yield one loss after each update "
        "of the weights. For gradient accumulation, set PortConfig(micro_batches=...) (logical_ranks of a run)."
    )
