"""Use strategies in a custom training loop: process groups, data, evaluation and checkpoints.

Start the processes with torchrun, srun or mpirun, or run a single one::

    recipe = ws.LoopRecipe(Net, lambda model: AdamW(model.parameters()), lambda model, batch: ...)
    with ws.open_world() as world:
        context = ws.RunContext(world, seed=0, logical_ranks=8)
        replica = ws.FSDP(reduce="ordered").replica(recipe, context)
        done = ws.restore(replica, folder, context)
        batches = ws.sample_batches(dataset, replica, context, batch_size=64, first=done)
        for step in range(done + 1, steps + 1):
            result = replica.step(next(batches))
        ws.save(replica, folder, context, step=steps)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import default_collate

from worldsize.checkpoint.format import Retention
from worldsize.checkpoint.load import find_newest, load_checkpoint
from worldsize.checkpoint.save import Saver
from worldsize.collectives.exact import exact_sum, start_all_gather
from worldsize.collectives.gather_full import use_full
from worldsize.core import (
    Batch,
    Cluster,
    ConfigError,
    Dealing,
    EvaluationBatches,
    Loss,
    Metrics,
    MicroBatch,
    Recipe,
    Replica,
    Role,
    RunContext,
    StepResult,
    World,
)
from worldsize.data import loader
from worldsize.data.batches import Collate
from worldsize.data.order import Order, assign_logical_ranks, step_seed
from worldsize.devices import check_kind, default_backend
from worldsize.record.determinism import state_digest, tensor_digests
from worldsize.seeds import derive_seed, seed_generators
from worldsize.world.environments import placement
from worldsize.world.world import open_world as open_world_of


@dataclass(frozen=True)
class LoopRecipe(Recipe):
    """A recipe built from functions, for loops that pass their own data; subclass it to add ``blocks``."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], Optimizer]
    compute_loss: Callable[[nn.Module, Batch], Loss]
    """Returns the loss for a model and a logical rank's batch; see :meth:`worldsize.core.Recipe.loss`."""
    make_schedule: Callable[[Optimizer], LRScheduler] | None = None
    """Returns the learning-rate schedule, advanced once per step."""
    compute_metrics: Callable[[nn.Module, Batch], Metrics] | None = None
    """Returns each metric as (sum, count) over a batch; see :meth:`worldsize.core.Recipe.evaluate`."""

    def model(self) -> nn.Module:
        return self.make_model()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.make_optimizer(model)

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        return self.make_schedule(optimizer) if self.make_schedule else None

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return self.compute_loss(model, batch)

    def data(self, split: str) -> Any:
        raise ConfigError(f"{type(self).__name__} does not load {split!r} data. Pass a dataset to ws.sample_batches.")

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, ...]]:
        if self.compute_metrics is None:
            raise ConfigError(f"{type(self).__name__} does not define metrics. Pass compute_metrics to it.")
        return self.compute_metrics(model, batch)


@contextmanager
def open_world(
    device: str = "cpu", *, seed: int = 0, threads: int | None = None, timeout: float = 600.0
) -> Iterator[World]:
    """Create the process groups under torchrun, srun or mpirun, and destroy them at the end of the block.

    Args:
        device: "cpu", "cuda" or any other torch device type; each process uses the device of its local rank.
        seed: Seed of the initial weights, equal on all ranks.
        threads: Threads per process; None: the host's cores divided by its processes.
        timeout: Timeout of collectives in seconds.

    Raises:
        ConfigError: The launcher's variables are incomplete or contradictory, or the device type is unknown.
    """
    check_kind(device)
    processes = placement(os.environ)
    cluster = Cluster(
        "own",
        nodes=-(-processes.world_size // processes.local_world_size),
        processes=processes.world_size,
        device=device,
        backend=default_backend(device),
        threads=threads,
        timeout=timeout,
    )
    with open_world_of(processes, cluster, {"worker": Role(processes.world_size)}) as world:
        seed_generators(derive_seed(seed, "init"), world.device)
        yield world


def local_logical_ranks(replica: Replica, context: RunContext) -> tuple[int, ...]:
    """Return the logical ranks that this process computes in a step, in ascending order.

    Raises:
        ConfigError: The number of logical ranks is not a multiple of the world size.
    """
    return _list_logical_ranks(context, replica.dealing)


def _list_logical_ranks(context: RunContext, dealing: Dealing) -> tuple[int, ...]:
    ranks, world = context.logical_ranks, context.world
    if ranks % world.size:
        raise ConfigError(f"logical_ranks={ranks} must be a multiple of the number of processes, {world.size}.")
    return assign_logical_ranks(world.rank, world.size, ranks, dealing)


def sample_batches(
    dataset: Any,
    replica: Replica,
    context: RunContext,
    *,
    batch_size: int,
    first: int = 0,
    workers: int = 0,
    collate: Collate = default_collate,
) -> Iterator[list[MicroBatch]]:
    """Yield this process's input to ``Replica.step``, for each step after ``first``, without end.

    Samples have the same order as in a run with the same seed and batch size, and default shuffling.

    Args:
        dataset: A map-style dataset, shuffled in each epoch by the context's seed, or a stream of samples,
            which is read again up to ``first``.
        replica: The replica to train.
        context: The context that created the replica.
        batch_size: Samples per step, over all logical ranks.
        first: Number of the last completed step.
        workers: Number of processes that load ahead; 0 loads in this process.
        collate: Combines a list of samples into a batch.

    Raises:
        ConfigError: ``batch_size`` is not a multiple of ``logical_ranks``, or ``logical_ranks`` of the world size.
    """
    ranks = context.logical_ranks
    if batch_size < 1 or batch_size % ranks:
        raise ConfigError(f"batch_size={batch_size} must be a multiple of logical_ranks={ranks}.")
    order = Order(context.seed, batch_size, ranks, local_logical_ranks(replica, context))
    return loader.micro_batches(dataset, order, context.world.device, first=first, workers=workers, collate=collate)


def micro_batches(batches: Mapping[int, Batch], context: RunContext, step: int) -> list[MicroBatch]:
    """Return the input to ``Replica.step``, given the batch of each local logical rank; ``step`` counts from 1.

    A micro-batch's seed depends on the run's seed, the step and the logical rank, but not on the process.

    Raises:
        ConfigError: ``batches`` does not have exactly the logical ranks of this process.
    """
    assigned = [set(_list_logical_ranks(context, dealing)) for dealing in get_args(Dealing)]
    if batches.keys() not in assigned:
        expected = max(assigned, key=lambda ranks: len(ranks & batches.keys()))
        raise ConfigError(
            "expected one batch for each logical rank in ws.local_logical_ranks(replica, context); missing: "
            f"{sorted(expected - batches.keys())}, unexpected: {sorted(batches.keys() - expected)}."
        )
    return [MicroBatch(batches[rank], step_seed(context.seed, step, rank), step, rank) for rank in sorted(batches)]


def average_loss(result: StepResult, world: World) -> float:
    """Return the mean loss of a step over all logical ranks, as a run logs it. Every rank must call it."""
    losses_pb = start_all_gather(torch.stack([*result.losses]).double(), world)()
    return exact_sum(losses_pb.flatten().tolist()) / losses_pb.numel()


def evaluate(
    replica: Replica, dataset: Any, world: World, *, batch_size: int = 64, collate: Collate = default_collate
) -> Mapping[str, float]:
    """Return the metrics of ``dataset``; each sample counts once at any world size. Every rank must call it."""
    return replica.evaluate(
        EvaluationBatches(lambda: loader.evaluation_batches(dataset, world, batch_size=batch_size, collate=collate))
    )


def compute_digest(replica: Replica, world: World) -> str:
    """Return the SHA-256 of the whole model, the ``state_digest`` of a run. Every rank must call it."""
    weights = replica.state()["model"]
    digests = [use_full(weights, world, lambda full: state_digest(tensor_digests(full)))]
    if world.group is not None:
        dist.broadcast_object_list(digests, group=world.group, group_src=0)
    return str(digests[0])


def save(replica: Replica, folder: str | Path, context: RunContext, *, step: int, keep: int = 2) -> None:
    """Write a checkpoint to ``folder`` and wait until it is complete. Every rank must call it.

    Args:
        replica: The replica to save.
        folder: Folder for checkpoints, on storage shared by all ranks.
        context: The context of the replica.
        step: Number of completed steps.
        keep: Number of newest checkpoints to keep.

    Raises:
        CheckpointError: The checkpoint cannot be written.
    """
    world = context.world
    saver = Saver(Path(folder), world, world.groups.get(f"checkpoint/{world.role}"), keep=Retention(last=keep))
    with closing(saver):
        saver.save(replica.state(), step=step, facts={"logical_ranks": context.logical_ranks})
        saver.finish()


def restore(replica: Replica, folder: str | Path, context: RunContext) -> int:
    """Load the newest checkpoint in ``folder``, saved at any world size. Every rank must call it.

    Warns if the number of logical ranks differs, or if only one of the two loops has a schedule.

    Returns:
        The step of the checkpoint; 0 if there is none.

    Raises:
        CheckpointError: The checkpoint is damaged, or does not match the model or the optimizer.
    """
    checkpoint = find_newest(Path(folder), context.world)
    if checkpoint is None:
        return 0
    state = replica.state()
    saved = (checkpoint.facts.get("logical_ranks"), bool(checkpoint.values.get("schedule")))
    now = (context.logical_ranks, bool(state["schedule"]))
    if saved != now and context.world.rank == 0:
        names = ("logical_ranks", "schedule")
        changes = [f"{name}: {old}, now {new}" for name, old, new in zip(names, saved, now, strict=True) if old != new]
        warnings.warn(
            f"{checkpoint.path} was saved by a different loop ({'; '.join(changes)}). Restore these settings to "
            "continue the same training.",
            stacklevel=2,
        )
    replica.load(load_checkpoint(checkpoint, state))
    return checkpoint.step
