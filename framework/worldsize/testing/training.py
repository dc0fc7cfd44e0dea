"""Trains a small recipe in the processes of a strategy, and in plain PyTorch, so that the two can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from worldsize.checkpoint.format import Retention
from worldsize.checkpoint.load import load, newest
from worldsize.checkpoint.save import Saver
from worldsize.collectives.gather_full import gather_full
from worldsize.collectives.per_rank import local
from worldsize.core import (
    Batch,
    CheckpointSource,
    Cluster,
    ConfigError,
    DataSource,
    EvaluationBatch,
    EvaluationBatches,
    MicroBatch,
    MultiUpdateRecipe,
    Recipe,
    Rendezvous,
    Replica,
    RunContext,
    StateDict,
    Strategy,
    World,
)
from worldsize.data.batches import Collate, collate_of, fetch
from worldsize.data.loader import drawn, evaluation_batches, micro_batches
from worldsize.data.order import Order, logical_ranks_of
from worldsize.strategies.loss_record import mean_loss
from worldsize.strategies.multi_train_state import optimizers_of
from worldsize.strategies.train_state import optimizer_of
from worldsize.testing.port_runs import mean_of
from worldsize.testing.recipes import ByMetric, Chain
from worldsize.testing.worlds import gathered, run_in_worlds
from worldsize.train.faults import Heap
from worldsize.worker.step_memory import StepMemory, writes_states
from worldsize.world.roles import role_ranks
from worldsize.world.scratch import temporary_folder

Step = Callable[[Batch, int], float]


def plain_step(recipe: Recipe, model: nn.Module) -> Step:
    """Return a function that trains ``model`` by one step, and returns the loss before the update.

    The function takes a batch and the number of the step, from 1.
    """
    return _several_updates(recipe, model) if isinstance(recipe, MultiUpdateRecipe) else _one_update(recipe, model)


def _one_update(recipe: Recipe, model: nn.Module) -> Step:
    optimizer = optimizer_of(recipe, model)

    def step(batch: Batch, _: int) -> float:
        loss = mean_loss(recipe.loss(model, batch))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return float(loss.detach())

    return step


def _several_updates(recipe: MultiUpdateRecipe, model: nn.Module) -> Step:
    optimizers = optimizers_of(recipe, model)
    schedules = recipe.schedules(optimizers)

    def step(batch: Batch, number: int) -> float:
        total = 0.0
        for names, loss in recipe.updates(model, batch, number):
            model.zero_grad()
            mean_loss(loss).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            for name in (names,) if isinstance(names, str) else names:
                optimizers[name].step()
                if name in schedules:
                    schedules[name].step()
            total += float(mean_loss(loss).detach())
        return total

    return step


def evaluate(
    replica: Replica, dataset: Any, world: World, *, batch_size: int, collate: Collate = default_collate
) -> Mapping[str, float]:
    """Return the metrics of the whole ``dataset``; every sample counts once, however many ranks there are."""
    return replica.evaluate(
        EvaluationBatches(lambda: evaluation_batches(dataset, world, batch_size=batch_size, collate=collate))
    )


STEPS, BATCH, SEED = 20, 24, 3
_TESTED = 5  # samples of a batch of an evaluation
CHAIN = Chain()
ALONE = World.alone(torch.device("cpu"))


@dataclass(frozen=True)
class Trained:
    """The outcome of :func:`train` or :func:`reference`; it is empty for a process that only served.

    Attributes:
        losses: Loss of each step, the mean over all ranks.
        error: Error on the test data.
        model: The model's full state by name, on rank 0; empty on the others.
        moved: Whether training changed parameters that this rank holds.
    """

    losses: Sequence[float]
    error: float
    model: Mapping[str, Tensor]
    moved: bool


def train(
    strategy: Strategy,
    context: RunContext,
    steps: int,
    folder: Path | None = None,
    *,
    save: bool = False,
    perturbed: bool = False,
    recipe: Recipe = CHAIN,
) -> Trained:
    """Train ``strategy`` in this process up to step ``steps``, or serve those that do, as its role says.

    Args:
        strategy: Strategy to train under.
        context: Context of this process; a step has at least as many logical ranks as the strategy defaults to.
        steps: Number of the last step.
        folder: Folder of checkpoints; training goes on from the newest one in it.
        save: Whether to save a checkpoint there after the last step.
        perturbed: Whether to train on a heap in disorder, which must not change a bit.
        recipe: Recipe to train; a :class:`~worldsize.testing.recipes.ByMetric` is evaluated in between, too.
    """
    heap, world = Heap(), context.world
    disturb = heap.perturb if perturbed else _nothing
    disturb()
    workers = context.workers if context.rendezvous else world.size
    cluster = cluster_with(strategy, workers)
    serves = strategy.roles(cluster)[world.role].serves
    parts = strategy.data_parallel(cluster)
    total = max(context.logical_ranks, parts * strategy.default_micro_batches)
    replica = (
        _served(strategy, recipe, context, total, folder=folder, disturb=disturb)
        if serves
        else strategy.replica(recipe, context)
    )
    if replica is None:
        return Trained((), math.nan, {}, moved=False)
    disturb()
    part = 0 if serves else strategy.data_rank(world)
    writes = not serves and writes_states(strategy, world)
    world = replace(world, rank=0, size=1) if serves else world
    part_of_world = replace(world, rank=part, size=1 if serves else parts)
    order = Order(SEED, BATCH, total, logical_ranks_of(part, parts, total, replica.dealing))
    memory = StepMemory(recipe, world, part_of_world, order)
    first = _resumed(replica, memory, world, folder)
    before = _held(replica)
    batches = (
        repeat([])  # of a process that leads those that train: they draw their data themselves
        if serves
        else micro_batches(recipe.data("train"), order, world.device, first=first, collate=collate_of(recipe))
    )
    evaluated = partial(
        evaluate, replica, recipe.data("test"), part_of_world, batch_size=_TESTED, collate=collate_of(recipe)
    )
    losses = []
    for step in range(first + 1, steps + 1):
        disturb()
        losses.append(mean_of(gathered(replica.step(next(batches)).losses, world)))
        if isinstance(recipe, ByMetric) and step % recipe.evaluate_every == 0:
            (value,) = evaluated().values()
            replica.advance_schedules(value, step=step)
    if save and folder is not None:
        _save(replica, world, folder, steps, streams=memory.states() if writes else {})
    (error,) = evaluated().values()
    moved = first == steps or any(not torch.equal(now, old) for now, old in zip(_held(replica), before, strict=True))
    model = gather_full(replica.state()["model"], world)
    replica.close(complete=True)
    return Trained(losses, error, {name: tensor.clone() for name, tensor in model.items()}, moved)


def _nothing() -> None: ...


def _served(
    strategy: Strategy,
    recipe: Recipe,
    context: RunContext,
    logical_ranks: int,
    *,
    folder: Path | None,
    disturb: Callable[[], None],
) -> Replica | None:
    """Serve to the end, or return the replica by which this process leads those that train."""
    run = replace(
        context,
        seed=SEED,
        steps=STEPS,
        logical_ranks=logical_ranks,
        data=_Data(recipe, Order(SEED, BATCH, logical_ranks, ()), disturb),
        checkpoints=_Checkpoints(folder),
    )
    return strategy.serve(recipe, run)


@final
@dataclass(frozen=True)
class _Data(DataSource):
    """The data of :func:`train`, for processes that draw them by themselves."""

    recipe: Recipe
    order: Order
    disturb: Callable[[], None]

    @cached_property
    def _train(self) -> Any:
        return self.recipe.data("train")

    def micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        self.disturb()
        return drawn(self._train, self.order, ALONE.device, step, logical_rank, collate_of(self.recipe))

    def evaluation(self, split: str, step: int, part: int, parts: int) -> Iterable[EvaluationBatch]:
        world = replace(ALONE, rank=part, size=parts)
        return evaluation_batches(self.recipe.data(split), world, batch_size=_TESTED, collate=collate_of(self.recipe))


@final
@dataclass(frozen=True)
class _Checkpoints(CheckpointSource):
    """The checkpoints of :func:`train`, for processes that restore by themselves."""

    folder: Path | None

    def restore(self, state: Callable[[], StateDict]) -> tuple[StateDict, int] | None:
        checkpoint = newest(self.folder, ALONE) if self.folder else None
        return (load(checkpoint, state()), checkpoint.step) if checkpoint else None


def _resumed(replica: Replica, memory: StepMemory, world: World, folder: Path | None) -> int:
    checkpoint = newest(folder, world) if folder else None
    if checkpoint is None:
        return 0
    replica.load(load(checkpoint, replica.state()))
    memory.resume(checkpoint)
    return checkpoint.step


def _save(replica: Replica, world: World, folder: Path, step: int, *, streams: Mapping[str, Tensor]) -> None:
    saver = Saver(folder, world, world.groups.get(f"checkpoint/{world.role}"), keep=Retention())
    saver.save(replica.state(), step=step, facts={"metrics": {}}, streams=streams)
    saver.finish()
    saver.close()


def _held(replica: Replica) -> list[Tensor]:
    tensors = [tensor for tensor in replica.state()["model"].values() if not tensor.is_meta]
    return [local(tensor).clone() for tensor in tensors]


def cluster_of(size: int, nodes: int = 1) -> Cluster:
    """Return a cluster of ``size`` CPU processes."""
    return Cluster("test", nodes, size, "cpu", "gloo")


def cluster_with(strategy: Strategy, workers: int) -> Cluster:
    """Return the smallest cluster on which ``workers`` processes train, beside those that serve."""
    for size in range(workers, 2 * workers + 9):
        with suppress(ConfigError):
            if strategy.roles(cluster_of(size))["worker"].processes == workers:
                return cluster_of(size)
    raise ValueError(f"{strategy} has no cluster with {workers} workers")


def run_in_roles(
    strategy: Strategy, body: Callable[[RunContext], Any], workers: int, *, local_size: int | None = None
) -> list[Any]:
    """Call ``body`` in every process of ``strategy``, and return the results of the ``workers`` that train.

    Where all processes serve, the list has only the result of the first, which leads.
    """
    cluster = cluster_with(strategy, workers)
    roles = strategy.roles(cluster)
    if set(roles) == {"worker"} and not roles["worker"].serves:
        return run_in_worlds(lambda world: body(RunContext(world)), workers, local_size=local_size)
    with temporary_folder() as folder:
        meeting = Rendezvous(folder, timeout=60.0)
        strategy.prepare(folder)
        results = run_in_worlds(
            lambda world: body(RunContext(world, workers=workers, rendezvous=meeting)),
            cluster.processes,
            roles=roles,
        )
    trains = role_ranks(roles)["worker"]
    return results[:1] if roles["worker"].serves else results[trains.start : trains.stop]


def reference(recipe: Recipe = CHAIN) -> Trained:
    """Train ``recipe`` by plain PyTorch on whole batches, in the documented order of samples."""
    model, data, order = recipe.model(), recipe.data("train"), Order(SEED, BATCH, 1, (0,))
    losses, step = [], plain_step(recipe, model)
    for number in range(1, STEPS + 1):
        losses.append(step(fetch(data, order.indices(number, 0, len(data)), collate_of(recipe)), number))
    with torch.no_grad():
        test = recipe.data("test")
        ((total, count),) = recipe.evaluate(
            model.eval(), fetch(test, torch.arange(len(test)), collate_of(recipe))
        ).values()
    error = float(total / count)
    return Trained(losses, error, model.state_dict(), moved=True)
