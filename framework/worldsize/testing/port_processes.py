"""Trains a recipe under a strategy on processes of this machine, those that serve among them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, final

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
from worldsize.data.fetch import collate_of
from worldsize.data.loader import drawn
from worldsize.plan.construction import check_construction, check_trainable
from worldsize.record.seeds import seed_generators, stream
from worldsize.testing.port_runs import PortConfig, Trained, context_of, mean_of, steps_of, weights_of
from worldsize.testing.worlds import gathered, run_in_worlds
from worldsize.train.averaging import AveragedReplica
from worldsize.world.scratch import temporary_folder


def trained_in_processes(recipe: Recipe, config: PortConfig, strategy: Strategy, processes: int) -> Trained:
    """Train ``recipe`` under ``strategy`` on ``processes`` processes of this machine.

    Raises:
        ConfigError: the strategy cannot train the recipe or average its weights, needs another number of processes,
            or the step does not divide over them.
    """
    check_trainable(recipe, strategy)
    check_construction(recipe, strategy)
    cluster = Cluster("test", 1, processes, "cpu", "gloo")
    roles, parts = strategy.roles(cluster), strategy.data_parallel(cluster)
    if config.micro_batches % parts:
        fits = math.lcm(config.micro_batches, parts)
        raise ConfigError(
            f"micro_batches={config.micro_batches} do not divide over {parts} processes. Set micro_batches={fits}: "
            "the reference then takes as many micro-batches a step, and yields the mean of their losses."
        )
    strategy.check_micro_batches(config.micro_batches // parts)
    if config.average and not strategy.averages_weights:
        raise ConfigError(
            f"{type(strategy).__name__} does not average weights. Set PortConfig(average=None), or compare under a "
            "strategy that does, such as DDP()."
        )
    with temporary_folder() as scratch:
        folder = Path(scratch) / "attempt" / "servers"  # as in a run folder: it and its parent are made private
        folder.mkdir(parents=True)
        strategy.prepare(folder)
        part = _Part(recipe, config, strategy, parts, roles, folder)
        ended = run_in_worlds(part.play, processes, roles=roles)
    return next(trained for trained in ended if trained is not None)


@final
class _Part:
    """One process's part of a training; it is forked with all that it holds."""

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

    def play(self, world: World) -> Trained | None:
        """Train or serve, as this process's role says; return None if it only serves others."""
        return self._serve(world) if self._roles[world.role].serves else self._train(world)

    def _train(self, world: World) -> Trained:
        """Train in a process that agrees with the others after each step."""
        config = self._seeded(world)
        replica = self._strategy.replica(self._recipe, self._context(world, config))
        if config.average:
            replica = AveragedReplica(replica, config.average)
        order = config.order(self._strategy.data_rank(world), self._parts, replica.dealing)
        steps = steps_of(self._recipe, config, order)
        losses = [mean_of(gathered(replica.step(step).losses, world)) for step in steps]
        trained = Trained(losses, weights_of(replica, world))
        replica.close(complete=True)
        return trained

    def _serve(self, world: World) -> Trained | None:
        """Serve, and lead the training if the strategy says so; return None unless this process leads."""
        config = self._seeded(world)
        replica = self._strategy.serve(self._recipe, self._context(world, config))
        if replica is None:
            return None
        losses = [mean_of(replica.step([]).losses) for _ in range(config.steps)]
        trained = Trained(losses, weights_of(replica, replace(world, rank=0, size=1)))
        replica.close(complete=True)
        return trained

    def _context(self, world: World, config: PortConfig) -> RunContext:
        return replace(
            context_of(world, config),
            workers=self._roles["worker"].processes,
            rendezvous=Rendezvous(self._folder),
            data=_Drawn(self._recipe, config),
        )

    def _seeded(self, world: World) -> PortConfig:
        """Seed the initial weights, and return the configuration for this process's device."""
        seed_generators(stream(self._config.seed, "init"), world.device)
        return replace(self._config, device=world.device)


@final
class _Drawn(DataSource):
    """Draws the micro-batches of a comparison by their numbers."""

    def __init__(self, recipe: Recipe, config: PortConfig) -> None:
        self._recipe, self._config = recipe, config

    @cached_property
    def _data(self) -> Any:
        return self._recipe.data("train")

    def micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        order, device = self._config.order(), self._config.device
        return drawn(self._data, order, device, step, logical_rank, collate_of(self._recipe))

    def evaluation(self, split: str, step: int, part: int, parts: int) -> Iterable[EvaluationBatch]:
        return []  # nothing is evaluated
