"""Check that a ported recipe trains exactly like the original program, under each strategy.

def original(model, batches):            # the program's own loop, on the given batches
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
    return model

def test_the_recipe_trains_as_the_program_does():
    same_losses(MyRecipe(), original, PortConfig(batch_size=32))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch

from worldsize.config.compose import compose_only
from worldsize.config.composed import build_settings, has_own_batches
from worldsize.core import (
    Cluster,
    ConfigError,
    DataSource,
    EvaluationBatch,
    MicroBatch,
    Recipe,
    Rendezvous,
    Role,
    RunContext,
    Strategy,
    World,
)
from worldsize.data.batches import get_collate_fn
from worldsize.data.loader import load_micro_batch
from worldsize.loop.averaging import AveragedReplica
from worldsize.plan.construction import check_construction, check_trainable
from worldsize.seeds import derive_seed, seed_generators
from worldsize.testing.port_causes import first_different, format_loss_difference, loss_causes, weight_difference
from worldsize.testing.port_runs import (
    PortConfig,
    Reference,
    Trained,
    average_losses,
    create_run_context,
    gather_weights,
    load_steps,
    recipe_trained,
    reference_trained,
)
from worldsize.testing.worlds import gather_losses, run_in_worlds
from worldsize.world.scratch import temporary_folder

__all__ = ["PortConfig", "Reference", "compose_recipe", "same_losses"]


def same_losses(
    recipe: Recipe,
    reference: Reference | Sequence[float],
    config: PortConfig,
    *,
    tolerance: float = 1e-6,
    strategy: Strategy | None = None,
    processes: int = 1,
) -> None:
    """Train ``recipe`` and ``reference`` on the same batches; compare losses and weights.

    Args:
        recipe: The recipe under test.
        reference: The original program's loop, a generator function ``reference(model, batches)``, or the losses logged
            by the original program, one per step.
            The generator runs in one process with ``recipe.model()`` and an iterator over exactly the micro-batches
            that the recipe trains on, ``config.micro_batches`` per step. It must yield the loss of each step. It may
            return its model or a state_dict at the end, in which the averages of ``config.average`` are named
            ``ema/<name>``. A program that builds a separate model must copy the weights first:
            ``own.load_state_dict(model.state_dict())``. Before each micro-batch, the random generators of torch, NumPy
            and Python are seeded as for the recipe, so that both use the same dropout masks.
        config: Number of steps, batch size and other settings of the comparison.
        tolerance: Maximum difference of losses, and of elements of the weights: absolute below 1, relative above.
        strategy: Strategy to train the recipe with. None for a plain loop in this process.
        processes: Number of processes under ``strategy``, including those that serve.

    Raises:
        AssertionError: a loss or a weight tensor differs; the message has the first difference and its cause.
    """
    expected = reference_trained(recipe, reference, config)
    if strategy is None:
        trained = recipe_trained(recipe, config)
    else:
        trained = train_in_processes(recipe, config, strategy, processes)
    told = _difference(trained, expected, tolerance)
    if told is None:
        return
    if strategy is not None:
        name = f"{type(strategy).__name__} on {processes} {'process' if processes == 1 else 'processes'}"
        alone = recipe_trained(recipe, config)
        if _difference(alone, expected, tolerance) is None:
            raise AssertionError(
                f"{told}\nCause: {name}. A plain loop on one process matches the reference. Check for sums in a "
                "different order (increase the tolerance), statistics over a batch, or a mean where loss should "
                "return (sum, weight)."
            )
        trained = alone
    causes = loss_causes(recipe, reference, config, trained, expected, tolerance)
    raise AssertionError("\n".join([told, *causes]))


def _difference(trained: Trained, expected: Trained, tolerance: float) -> str | None:
    """Describe the first difference in the losses, else in the weights, or return None."""
    if (step := first_different(trained.losses, expected.losses, tolerance)) is not None:
        return format_loss_difference(step, trained.losses[step - 1], expected.losses[step - 1], tolerance)
    if not expected.weights:
        return None
    return weight_difference(trained.weights, expected.weights, tolerance)


def compose_recipe(*overrides: str, steps: int = 20) -> tuple[Recipe, PortConfig]:
    """Build the recipe that ``train.py`` would train with ``overrides``, and its PortConfig.

    A step is one micro-batch unless ``logical_ranks`` is set, regardless of the cluster's processes. A test can thus
    compare the recipe's YAML, such as its learning rate and batch size, with the program too:

        recipe, config = compose_recipe("recipe=sine")

    Args:
        overrides: Command-line arguments of ``train.py``.
        steps: Number of steps to compare, from the start; schedules still have the length of the whole run.

    Raises:
        ConfigError: ``train.py`` would refuse the arguments.
    """
    cfg = compose_only(overrides)
    own_batches = has_own_batches(cfg)
    settings = build_settings(cfg)
    training = settings.training
    micro_batches = settings.config.get("logical_ranks") or 1
    config = PortConfig(
        batch_size=micro_batches if own_batches else training.batch_size,
        micro_batches=micro_batches,
        steps=min(steps, training.steps),
        seed=training.seed,
        numerics=settings.numerics,
        length_balanced=training.length_balanced,
        average=settings.average,
        device=torch.device("cpu"),
    )
    return settings.recipe, config


def train_in_processes(recipe: Recipe, config: PortConfig, strategy: Strategy, processes: int) -> Trained:
    """Train ``recipe`` under ``strategy`` on ``processes`` local processes.

    Raises:
        ConfigError: the strategy cannot train the recipe or average its weights, needs a different number of processes,
            or cannot divide the step among them.
    """
    check_trainable(recipe, strategy)
    check_construction(recipe, strategy)
    cluster = Cluster("test", 1, processes, "cpu", "gloo")
    roles, parts = strategy.roles(cluster), strategy.data_parallel(cluster)
    if config.micro_batches % parts:
        fits = math.lcm(config.micro_batches, parts)
        raise ConfigError(
            f"micro_batches={config.micro_batches} is not divisible by {parts} processes. Set micro_batches={fits}, "
            f"and let the reference use {fits} micro-batches per step and yield the mean of their losses."
        )
    strategy.check_micro_batches(config.micro_batches // parts)
    if config.average and "ema" not in strategy.supports:
        raise ConfigError(
            f"{type(strategy).__name__} does not support weight averaging. Set PortConfig(average=None), or use a "
            "strategy with weight averaging, such as DDP()."
        )
    with temporary_folder() as scratch:
        folder = Path(scratch) / "attempt" / "servers"  # as in a run folder: the folder and its parent are made private
        folder.mkdir(parents=True)
        strategy.prepare(folder)
        part = _Part(recipe, config, strategy, parts, roles, folder)
        ended = run_in_worlds(part.run_role, processes, roles=roles)
    return next(trained for trained in ended if trained is not None)


@final
class _Part:
    """Trains or serves in one process, according to its role. Forked processes inherit the attributes."""

    def __init__(
        self,
        recipe: Recipe,
        config: PortConfig,
        strategy: Strategy,
        parts: int,
        roles: Mapping[str, Role],
        folder: Path,
    ) -> None:
        self._recipe, self._config, self._strategy = recipe, config, strategy
        self._parts, self._roles, self._folder = parts, roles, folder

    def run_role(self, world: World) -> Trained | None:
        """Train or serve, according to this process's role; return None if this process only serves."""
        return self._run_server(world) if self._roles[world.role].serves else self._run_worker(world)

    def _run_worker(self, world: World) -> Trained:
        """Train as one of several ranks, and gather the losses after each step."""
        config = self._seed_weights(world)
        replica = self._strategy.replica(self._recipe, self._create_context(world, config))
        if config.average:
            replica = AveragedReplica(replica, config.average)
        order = config.order(self._strategy.data_rank(world), self._parts, replica.dealing)
        steps = load_steps(self._recipe, config, order)
        losses = [average_losses(gather_losses(replica.step(step).losses, world)) for step in steps]
        trained = Trained(losses, gather_weights(replica, world))
        replica.close(complete=True)
        return trained

    def _run_server(self, world: World) -> Trained | None:
        """Serve, and lead if the strategy requires it; return None if this process does not lead."""
        config = self._seed_weights(world)
        replica = self._strategy.serve(self._recipe, self._create_context(world, config))
        if replica is None:
            return None
        losses = [average_losses(replica.step([]).losses) for _ in range(config.steps)]
        trained = Trained(losses, gather_weights(replica, replace(world, rank=0, size=1)))
        replica.close(complete=True)
        return trained

    def _create_context(self, world: World, config: PortConfig) -> RunContext:
        return replace(
            create_run_context(world, config),
            workers=self._roles["worker"].processes,
            rendezvous=Rendezvous(self._folder),
            data=_Drawn(self._recipe, config),
        )

    def _seed_weights(self, world: World) -> PortConfig:
        """Seed the initial weights, and return the configuration for this process's device."""
        seed_generators(derive_seed(self._config.seed, "init"), world.device)
        return replace(self._config, device=world.device)


@final
class _Drawn(DataSource):
    """Provides the micro-batches of a comparison by step and logical rank."""

    def __init__(self, recipe: Recipe, config: PortConfig) -> None:
        self._recipe, self._config = recipe, config

    @cached_property
    def _data(self) -> Any:
        return self._recipe.data("train")

    def micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        order, device = self._config.order(), self._config.device
        return load_micro_batch(self._data, order, device, step, logical_rank, get_collate_fn(self._recipe))

    def evaluation(self, split: str, step: int, part: int, parts: int) -> Iterable[EvaluationBatch]:
        return []  # nothing is evaluated
