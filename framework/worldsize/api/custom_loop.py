"""Use strategies in a custom training loop: process groups, micro-batches and checkpoints.

Start the processes with torchrun, srun or mpirun, or run a single one::

    recipe = ws.LoopRecipe(Net, lambda model: AdamW(model.parameters()), lambda model, batch: ...)
    with ws.open_world() as world:
        context = ws.RunContext(world, seed=0, logical_ranks=8)
        replica = ws.FSDP(reduce="ordered").replica(recipe, context)
        done = ws.restore(replica, folder, world)
        for step in range(done + 1, steps + 1):
            batches = {rank: load(step, rank) for rank in ws.local_logical_ranks(replica, context)}
            result = replica.step(ws.micro_batches(batches, context, step))
        ws.save(replica, folder, world, step=steps)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from worldsize.checkpoint.format import Retention
from worldsize.checkpoint.load import find_newest, load_checkpoint
from worldsize.checkpoint.save import Saver
from worldsize.core import (
    Batch,
    Cluster,
    ConfigError,
    Loss,
    MicroBatch,
    Recipe,
    Replica,
    Role,
    RunContext,
    World,
)
from worldsize.data.order import assign_logical_ranks, step_seed
from worldsize.devices import check_kind, default_backend
from worldsize.seeds import derive_seed, seed_generators
from worldsize.world.environments import placement
from worldsize.world.world import open_world as open_world_of


@dataclass(frozen=True)
class LoopRecipe(Recipe):
    """A recipe built from functions, for loops that handle data and evaluation; subclass it to add ``blocks``."""

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], Optimizer]
    compute_loss: Callable[[nn.Module, Batch], Loss]
    """Returns the loss for a model and a logical rank's batch; see :meth:`worldsize.core.Recipe.loss`."""
    make_schedule: Callable[[Optimizer], LRScheduler] | None = None

    def model(self) -> nn.Module:
        return self.make_model()

    def optimizer(self, model: nn.Module) -> Optimizer:
        return self.make_optimizer(model)

    def schedule(self, optimizer: Optimizer) -> LRScheduler | None:
        return self.make_schedule(optimizer) if self.make_schedule else None

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return self.compute_loss(model, batch)

    def data(self, split: str) -> Any:
        raise ConfigError(f"{type(self).__name__} does not load {split!r} data. Pass batches to ws.micro_batches.")

    def evaluate(self, model: nn.Module, batch: Batch) -> Mapping[str, tuple[Tensor, ...]]:
        raise ConfigError(f"{type(self).__name__} does not evaluate. Compute metrics in the loop.")


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
    ranks, world = context.logical_ranks, context.world
    if ranks % world.size:
        raise ConfigError(f"logical_ranks={ranks} must be a multiple of the number of processes, {world.size}.")
    return assign_logical_ranks(world.rank, world.size, ranks, replica.dealing)


def micro_batches(batches: Mapping[int, Batch], context: RunContext, step: int) -> list[MicroBatch]:
    """Return the input of ``Replica.step``, given the batch of each local logical rank; ``step`` counts from 1.

    A micro-batch's seed depends on the run's seed, the step and the logical rank, but not on the process.
    """
    return [MicroBatch(batches[rank], step_seed(context.seed, step, rank), step, rank) for rank in sorted(batches)]


def save(replica: Replica, folder: str | Path, world: World, *, step: int, keep: int = 2) -> None:
    """Write a checkpoint to ``folder`` and wait until it is complete. Every rank must call it.

    Args:
        replica: The replica to save.
        folder: Folder for checkpoints, on storage shared by all ranks.
        world: The world of the replica.
        step: Number of completed steps.
        keep: Number of newest checkpoints to keep.

    Raises:
        CheckpointError: The checkpoint cannot be written.
    """
    saver = Saver(Path(folder), world, world.groups.get(f"checkpoint/{world.role}"), keep=Retention(last=keep))
    with closing(saver):
        saver.save(replica.state(), step=step, facts={})
        saver.finish()


def restore(replica: Replica, folder: str | Path, world: World) -> int:
    """Load the newest checkpoint in ``folder``, saved at any world size. Every rank must call it.

    Returns:
        The step of the checkpoint; 0 if there is none.

    Raises:
        CheckpointError: The checkpoint is damaged, or does not match the model or the optimizer.
    """
    checkpoint = find_newest(Path(folder), world)
    if checkpoint is None:
        return 0
    replica.load(load_checkpoint(checkpoint, replica.state()))
    return checkpoint.step
