"""Train a small recipe in the processes of a strategy, and in plain PyTorch for comparison."""

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

from worldsize.api.custom_loop import evaluate
from worldsize.checkpoint.format import Retention
from worldsize.checkpoint.load import find_newest, load_checkpoint
from worldsize.checkpoint.save import Saver
from worldsize.collectives.gather_full import gather_full
from worldsize.collectives.per_rank import get_local_shard
from worldsize.core import (
    Batch,
    CheckpointSource,
    Cluster,
    ConfigError,
    DataSource,
    EvaluationBatch,
    MicroBatch,
    Recipe,
    Rendezvous,
    Replica,
    RunContext,
    StateDict,
    Strategy,
    World,
)
from worldsize.data.batches import fetch_batch, get_collate_fn
from worldsize.data.loader import evaluation_batches, load_micro_batch, micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.loop.faults import Heap
from worldsize.optimizers.groups import create_optimizers
from worldsize.strategies.loss_record import mean_loss
from worldsize.testing.port_runs import average_losses
from worldsize.testing.recipes import ByMetric, Chain
from worldsize.testing.worlds import gather_losses, run_in_worlds
from worldsize.worker.step_memory import StepMemory, writes_states
from worldsize.world.roles import role_ranks
from worldsize.world.scratch import temporary_folder

Step = Callable[[Batch, int], float]


def plain_step(recipe: Recipe, model: nn.Module) -> Step:
    """Return a function that trains ``model`` for one step and returns the loss before the update.

    The function's arguments are a batch and the number of the step, from 1.
    """
    optimizers = create_optimizers(recipe, model)
    schedules = recipe.schedules(optimizers)

    def train_step(batch: Batch, number: int) -> float:
        total = 0.0
        for names, loss in recipe.micro_batch_updates(model, MicroBatch(batch, SEED, number)):
            model.zero_grad()
            mean_loss(loss).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            for name in (names,) if isinstance(names, str) else names:
                optimizers[name].step()
                if name in schedules:
                    schedules[name].step()
            total += float(mean_loss(loss).detach())
        return total

    return train_step


STEPS, BATCH, SEED = 20, 24, 3
_TESTED = 5  # samples per evaluation batch
CHAIN = Chain()
ALONE = World.create_single(torch.device("cpu"))


@dataclass(frozen=True)
class Trained:
    """The outcome of :func:`train` or :func:`reference`; empty for a process that only served.

    Attributes:
        losses: Loss of each step, averaged over all ranks.
        error: Error on the test data.
        model: The model's full state by name, on rank 0; empty on other ranks.
        moved: Whether training changed the parameters held by this rank.
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
    """Train with ``strategy`` up to step ``steps``, or serve, according to the role.

    Args:
        strategy: Strategy to train with.
        context: Context of this process; a step has at least the strategy's default number of logical ranks.
        steps: Number of the last step.
        folder: Folder of checkpoints; training resumes from the newest one in it.
        save: Whether to save a checkpoint to ``folder`` after the last step.
        perturbed: Whether to train with a perturbed heap layout; results must be bit-identical.
        recipe: Recipe to train; a :class:`~worldsize.testing.recipes.ByMetric` is also evaluated during training.
    """
    heap, world = Heap(), context.world
    disturb = heap.perturb if perturbed else _skip_perturbation
    disturb()
    workers = context.workers if context.rendezvous else world.size
    cluster = cluster_with(strategy, workers)
    serves = strategy.roles(cluster)[world.role].serves
    parts = strategy.data_parallel(cluster)
    total = max(context.logical_ranks, parts * strategy.default_micro_batches)
    replica = (
        _run_server(strategy, recipe, context, total, folder=folder, disturb=disturb)
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
    order = Order(SEED, BATCH, total, assign_logical_ranks(part, parts, total, replica.dealing))
    memory = StepMemory(recipe, world, part_of_world, order)
    first = _load_newest_checkpoint(replica, memory, world, folder)
    before = _clone_local_weights(replica)
    batches = (
        repeat([])  # a leading server does not load data
        if serves
        else micro_batches(recipe.data("train"), order, world.device, first=first, collate=get_collate_fn(recipe))
    )
    evaluated = partial(
        evaluate, replica, recipe.data("test"), part_of_world, batch_size=_TESTED, collate=get_collate_fn(recipe)
    )
    losses = []
    for step in range(first + 1, steps + 1):
        disturb()
        losses.append(average_losses(gather_losses(replica.step(next(batches)).losses, world)))
        if isinstance(recipe, ByMetric) and step % recipe.evaluate_every == 0:
            (value,) = evaluated().values()
            replica.advance_schedules(value, step=step)
    if save and folder is not None:
        _save_checkpoint(replica, world, folder, steps, streams=memory.collect_states() if writes else {})
    (error,) = evaluated().values()
    moved = first == steps or any(
        not torch.equal(now, old) for now, old in zip(_clone_local_weights(replica), before, strict=True)
    )
    model = gather_full(replica.state()["model"], world)
    replica.close(complete=True)
    return Trained(losses, error, {name: tensor.clone() for name, tensor in model.items()}, moved)


def _skip_perturbation() -> None: ...


def _run_server(
    strategy: Strategy,
    recipe: Recipe,
    context: RunContext,
    logical_ranks: int,
    *,
    folder: Path | None,
    disturb: Callable[[], None],
) -> Replica | None:
    """Serve until the end and return None, or return the replica if this process leads the training."""
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
    """The data of :func:`train`, for processes that load their own data."""

    recipe: Recipe
    order: Order
    disturb: Callable[[], None]

    @cached_property
    def _train(self) -> Any:
        return self.recipe.data("train")

    def micro_batch(self, step: int, logical_rank: int) -> MicroBatch:
        self.disturb()
        return load_micro_batch(self._train, self.order, ALONE.device, step, logical_rank, get_collate_fn(self.recipe))

    def evaluation(self, split: str, step: int, part: int, parts: int) -> Iterable[EvaluationBatch]:
        world = replace(ALONE, rank=part, size=parts)
        return evaluation_batches(
            self.recipe.data(split), world, batch_size=_TESTED, collate=get_collate_fn(self.recipe)
        )


@final
@dataclass(frozen=True)
class _Checkpoints(CheckpointSource):
    """The checkpoints of :func:`train`, for processes that restore their own state."""

    folder: Path | None

    def restore(self, state: Callable[[], StateDict]) -> tuple[StateDict, int] | None:
        checkpoint = find_newest(self.folder, ALONE) if self.folder else None
        return (load_checkpoint(checkpoint, state()), checkpoint.step) if checkpoint else None


def _load_newest_checkpoint(replica: Replica, memory: StepMemory, world: World, folder: Path | None) -> int:
    checkpoint = find_newest(folder, world) if folder else None
    if checkpoint is None:
        return 0
    replica.load(load_checkpoint(checkpoint, replica.state()))
    memory.resume(checkpoint)
    return checkpoint.step


def _save_checkpoint(replica: Replica, world: World, folder: Path, step: int, *, streams: Mapping[str, Tensor]) -> None:
    saver = Saver(folder, world, world.groups.get(f"checkpoint/{world.role}"), keep=Retention())
    saver.save(replica.state(), step=step, facts={"metrics": {}}, streams=streams)
    saver.finish()
    saver.close()


def _clone_local_weights(replica: Replica) -> list[Tensor]:
    tensors = [tensor for tensor in replica.state()["model"].values() if not tensor.is_meta]
    return [get_local_shard(tensor).clone() for tensor in tensors]


def create_cluster(size: int, nodes: int = 1) -> Cluster:
    """Return a cluster of ``size`` CPU processes."""
    return Cluster("test", nodes, size, "cpu", "gloo")


def cluster_with(strategy: Strategy, workers: int) -> Cluster:
    """Return the smallest cluster with ``workers`` training processes, besides servers."""
    for size in range(workers, 2 * workers + 9):
        with suppress(ConfigError):
            if strategy.roles(create_cluster(size))["worker"].processes == workers:
                return create_cluster(size)
    raise ValueError(f"{strategy} does not fit any cluster with {workers} workers")


def run_in_roles(
    strategy: Strategy, body: Callable[[RunContext], Any], workers: int, *, local_size: int | None = None
) -> list[Any]:
    """Call ``body`` in all processes of a run with ``workers`` workers; return the workers' results.

    If all processes serve, the list has only the result of the first one, the leader.
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
    """Train ``recipe`` in plain PyTorch on whole batches, in the documented order of samples."""
    model, data, order = recipe.model(), recipe.data("train"), Order(SEED, BATCH, 1, (0,))
    losses, step = [], plain_step(recipe, model)
    for number in range(1, STEPS + 1):
        losses.append(
            step(fetch_batch(data, order.compute_indices(number, 0, len(data)), get_collate_fn(recipe)), number)
        )
    with torch.no_grad():
        test = recipe.data("test")
        ((total, count),) = recipe.evaluate(
            model.eval(), fetch_batch(test, torch.arange(len(test)), get_collate_fn(recipe))
        ).values()
    error = float(total / count)
    return Trained(losses, error, model.state_dict(), moved=True)
