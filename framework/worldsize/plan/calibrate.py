"""Measures time and memory of a recipe's step by running a few steps on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from worldsize.core import ConfigError, MicroBatch, Numerics, Recipe, RunContext, Workload, World
from worldsize.data.batches import get_collate_fn
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order
from worldsize.plan.dry_run import first_device, measure_medians, run_concurrently
from worldsize.strategies.model_passes import choose_checkpoint_policy
from worldsize.strategies.model_replica import ModelReplica, autocast
from worldsize.strategies.synchronous import create_local_replica

_SECONDS = 2.0  # minimum total duration of the steps


def calibrate(
    recipe: Recipe, numerics: Numerics, order: Order, kind: str, *, at_once: int = 1, threads: int = 1
) -> Workload:
    """Measure the workload of the micro-batches in ``order`` on one process.

    It uses ``threads`` threads and this machine's first device of type ``kind`` ("cpu", "cuda"). ``compute_seconds`` is
    the median of at least eleven steps and two seconds, including waits for data.

    ``at_once`` processes run the same steps concurrently. The step time is that of the slowest, as in a run with shared
    cores and memory. The processes are forked: this process must not have an OpenMP pool or have used CUDA.

    Raises:
        ConfigError: this machine has too little memory.
    """
    device = first_device(kind)
    try:
        return run_concurrently(at_once, threads, _measure_workload, recipe, numerics, order, device)
    except Exception as error:
        if not _is_memory(error):
            raise
        raise ConfigError(
            f"out of memory: the recipe's step does not fit on this machine with {at_once} concurrent "
            f"process(es) ({type(error).__name__}). Pass --model-size PARAMETERS --compute TIME instead."
        ) from error


def _is_memory(error: Exception) -> bool:
    """Return whether memory ran out; the kernel's OOM killer breaks a process pool."""
    known = isinstance(error, BrokenProcessPool | torch.OutOfMemoryError | MemoryError)
    return known or "can't allocate memory" in str(error)


def _measure_workload(recipe: Recipe, numerics: Numerics, order: Order, device: torch.device) -> Workload:
    return _Calibration(recipe, numerics, order, device).workload()


@final
@dataclass
class _Calibration:
    recipe: Recipe
    numerics: Numerics
    order: Order
    device: torch.device

    def workload(self) -> Workload:
        model, collate = self.recipe.model().to(self.device), get_collate_fn(self.recipe)
        batches = micro_batches(self.recipe.data("train"), self.order, self.device, collate=collate)
        activations = self._activations(model, next(batches)[0])  # before the replica changes the model
        replica = create_local_replica(self.recipe, model, RunContext(World.create_single(self.device), self.numerics))
        seconds, forward, update = self._time_step_parts(replica, model, lambda: next(batches))
        parameters, optimizers = list(model.parameters()), replica.train_state.optimizers
        blocks = list(self.recipe.blocks(model))
        return Workload(
            parameter_bytes=_count_bytes(parameters),
            optimizer_bytes=_count_bytes(
                value for each in optimizers for kept in each.state_dict()["state"].values() for value in kept.values()
            ),
            unit_bytes=max((_count_bytes(block.parameters()) for block in blocks), default=_count_bytes(parameters)),
            activation_bytes=activations.compute_peak_bytes(self.numerics),
            boundary_bytes=activations.boundary,
            blocks=len(blocks),
            compute_seconds=seconds,
            update_seconds=min(update, seconds),
            overlap=self._compute_overlap(seconds, forward, update),
            sum_seconds=self._sum_seconds(sum(parameter.numel() for parameter in parameters)),
        )

    def _activations(self, model: nn.Module, batch: MicroBatch) -> Activations:
        with autocast(self.device, self.numerics.precision):
            updates = self.recipe.micro_batch_updates
            return measure_activations(model, self.recipe.blocks(model), lambda: list(updates(model, batch)))

    def _compute_overlap(self, seconds: float, forward: float, update: float) -> float:
        """Return the fraction of compute in the backward pass, or 0 with several updates."""
        return 0.0 if self.recipe.has_several_updates else max(0.0, seconds - forward - update) / seconds

    def _time_step_parts(
        self, replica: ModelReplica, model: nn.Module, draw: Callable[[], list[MicroBatch]]
    ) -> tuple[float, float, float]:
        """Return the seconds of a whole step, of data loading and forward passes, and of the update.

        The remainder is the backward pass.
        """

        def run_forward() -> None:
            for batch in draw():
                with autocast(self.device, self.numerics.precision):
                    list(self.recipe.micro_batch_updates(model, batch))

        def run_update() -> None:
            for optimizer in replica.train_state.optimizers:
                optimizer.step()

        step = self._time_action(lambda: replica.step(draw()), _SECONDS)
        return step, self._time_action(run_forward), self._time_action(run_update)

    def _sum_seconds(self, numbers: int) -> float:
        values_n = torch.randn(numbers, device=self.device)
        others_n = values_n.clone()
        return self._time_action(lambda: others_n.add_(values_n))

    def _time_action(self, action: Callable[[], object], least_seconds: float = 0.0) -> float:
        (seconds,) = measure_medians(repeat([action]), self.device, least_seconds)
        return seconds


def _count_bytes(tensors: Any) -> float:
    return float(sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor)))


@final
@dataclass(frozen=True)
class Activations:
    """Bytes of a micro-batch's activations, excluding parameters.

    Attributes:
        total: Bytes of all activations.
        blocks: Bytes saved by each block.
        products: Bytes saved by each block with ``activation_checkpointing=selective``.
        boundary: Bytes of the largest output of a block.
    """

    total: float
    blocks: Sequence[float]
    products: Sequence[float]
    boundary: float

    def compute_peak_bytes(self, numerics: Numerics) -> float:
        """Return the peak bytes on the device during the backward pass, given ``numerics``.

        Recomputing a block, or copying it back from the host, needs memory for the whole block. Without blocks,
        offloaded activations return one by one and are ignored.
        """
        block, outside = max(self.blocks, default=0.0), self.total - sum(self.blocks)
        if numerics.activation_offload:
            return block
        inputs = self.boundary * len(self.blocks)
        match numerics.activation_checkpointing:
            case "full":
                return min(self.total, outside + inputs + block)
            case "selective":
                return min(self.total, outside + inputs + sum(self.products) + block)
        return self.total


def measure_activations(model: nn.Module, blocks: Sequence[nn.Module], forward: Callable[[], object]) -> Activations:
    """Measure the activations of ``forward``, which calls ``model``, in total and for each of ``blocks``."""
    counter = _Counter({parameter.untyped_storage().data_ptr() for parameter in model.parameters()})
    hooks = [block.register_forward_pre_hook(counter.enter_block) for block in blocks]
    hooks += [block.register_forward_hook(counter.leave_block) for block in blocks]
    try:
        with (
            torch.autograd.graph.saved_tensors_hooks(counter.record_saved_tensor, lambda tensor: tensor),
            _Products(counter),
        ):
            loss = forward()
    finally:
        for hook in hooks:
            hook.remove()
    del loss
    by_block = [sum(kept.values()) for kept in counter.kept]
    outside, *inside = by_block
    return Activations(outside + sum(inside), inside, counter.products, max(counter.outputs, default=0.0))


@final
@dataclass
class _Counter:
    """Bytes of saved storages, by block and address; the first entry is for storages outside of blocks."""

    parameters: set[int]
    kept: list[dict[int, float]] = field(default_factory=lambda: [{}])
    products: list[float] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)
    is_inside: bool = False

    def record_saved_tensor(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self.parameters and not any(address in kept for kept in self.kept):
            self.kept[-1 if self.is_inside else 0][address] = float(storage.nbytes())
        return tensor

    def enter_block(self, *_: Any) -> None:
        self.is_inside = True
        self.kept.append({})
        self.products.append(0.0)

    def leave_block(self, _: nn.Module, inputs: Any, output: Any) -> None:
        self.is_inside = False
        self.outputs.append(_tree_bytes(output))


@final
class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums, for each block, the bytes of the results saved by selective checkpointing."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **kwargs or {})
        if (
            self._counter.is_inside
            and choose_checkpoint_policy(None, func, *args, **kwargs or {}) is CheckpointPolicy.MUST_SAVE
        ):
            self._counter.products[-1] += _tree_bytes(made)
        return made


def _tree_bytes(tree: Any) -> float:
    return float(sum(each.nbytes for each in tree_leaves(tree) if isinstance(each, Tensor)))
