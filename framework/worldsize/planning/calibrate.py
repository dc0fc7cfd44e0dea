"""What a recipe's step needs, found out by taking a few on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from threading import BrokenBarrierError
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError, MicroBatch, Numerics, Recipe, Workload, World
from worldsize.engine.data import Order, micro_batches
from worldsize.strategies.synchronous import SynchronousReplica, alone, autocast
from worldsize.world.fork import ready_to_fork

_WARM_UP, _STEPS = 2, 11


def first_device(kind: str) -> torch.device:
    """This machine's first of a ``kind``: "cpu" or "cuda"."""
    return torch.device(kind, 0) if kind == "cuda" else torch.device(kind)


def calibrate(
    recipe: Recipe, numerics: Numerics, order: Order, kind: str, *, at_once: int = 1, threads: int = 1
) -> Workload:
    """Of the micro-batches in ``order``, on one process of so many ``threads`` and this machine's first device of a
    ``kind`` ("cpu", "cuda"): its ``compute_seconds``, the wait for data included, are the median of eleven steps.

    With ``at_once`` processes, which do the same at the same time, each step is as long as the longest of them: as it
    will be where they share cores and memory. They are forked: this process must have no OpenMP pool, and must not
    have used CUDA.

    Raises:
        ConfigError: this machine's memory does not hold what they need.
    """
    context = get_context("fork")
    barrier = context.Barrier(at_once, timeout=600)
    with ProcessPoolExecutor(at_once, context, initializer=_join, initargs=(barrier,)) as pool:
        with ready_to_fork():
            parts = [pool.submit(_calibrated, recipe, numerics, order, kind, threads) for _ in range(at_once)]
        errors = [error for part in parts if (error := part.exception()) and not isinstance(error, BrokenBarrierError)]
    if errors and _is_memory(errors[0]):
        raise ConfigError(
            f"this machine cannot take the recipe's steps, {at_once} process(es) at once: {type(errors[0]).__name__}, "
            "its memory does not do. Give what they need: --model-size PARAMETERS --compute TIME."
        ) from errors[0]
    if errors:
        raise errors[0]
    return parts[-1].result()


def _is_memory(error: BaseException) -> bool:
    """A process that the kernel kills for its memory breaks its pool."""
    known = isinstance(error, BrokenProcessPool | torch.OutOfMemoryError | MemoryError)
    return known or "can't allocate memory" in str(error)


_together: list[Barrier] = []  # in a process that calibrates: where all of them meet


def _join(barrier: Barrier) -> None:
    _together.append(barrier)


def _calibrated(recipe: Recipe, numerics: Numerics, order: Order, kind: str, threads: int) -> Workload:
    torch.set_num_threads(threads)
    try:
        return _Calibration(recipe, numerics, order, first_device(kind)).workload()
    except BaseException:
        _together[0].abort()  # the others need not wait
        raise


@final
@dataclass
class _Calibration:
    recipe: Recipe
    numerics: Numerics
    order: Order
    device: torch.device

    def workload(self) -> Workload:
        model = self.recipe.model().to(self.device)
        replica = alone(self.recipe, model, World("worker", 0, 1, 0, 1, 0, 0, self.device), self.numerics)
        batches = micro_batches(self.recipe.data("train"), self.order, self.device)
        seconds, forward, update = self._seconds(replica, model, lambda: next(batches))
        parameters, optimizer = list(model.parameters()), replica.optimizer
        blocks = list(self.recipe.blocks(model))
        with autocast(self.device, self.numerics.precision):
            activation_bytes, boundary_bytes = _activations(self.recipe, model, blocks, next(batches)[0])
        return Workload(
            parameter_bytes=_bytes(parameters),
            optimizer_bytes=_bytes(value for kept in optimizer.state.values() for value in kept.values()),
            unit_bytes=max((_bytes(block.parameters()) for block in blocks), default=_bytes(parameters)),
            activation_bytes=activation_bytes,
            boundary_bytes=boundary_bytes,
            blocks=len(blocks),
            compute_seconds=seconds,
            update_seconds=min(update, seconds),
            overlap=max(0.0, seconds - forward - update) / seconds,
            sum_seconds=self._sum_seconds(sum(parameter.numel() for parameter in parameters)),
        )

    def _seconds(
        self, replica: SynchronousReplica, model: nn.Module, draw: Callable[[], list[MicroBatch]]
    ) -> tuple[float, float, float]:
        """Of a whole step; of its data and forward passes; of its update. What is left is the backward pass."""

        def forward() -> None:
            for batch in draw():
                with autocast(self.device, self.numerics.precision):
                    self.recipe.loss(model, batch.data)

        return self._timed(lambda: replica.step(draw())), self._timed(forward), self._timed(replica.optimizer.step)

    def _sum_seconds(self, numbers: int) -> float:
        values_n = torch.randn(numbers, device=self.device)
        others_n = values_n.clone()
        return self._timed(lambda: others_n.add_(values_n))

    def _timed(self, action: Callable[[], object]) -> float:
        return statistics.median([self._once(action) for _ in range(_WARM_UP + _STEPS)][_WARM_UP:])

    def _once(self, action: Callable[[], object]) -> float:
        _together[0].wait()
        begun = time.perf_counter()
        action()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        _together[0].wait()
        return time.perf_counter() - begun


def _bytes(tensors: Any) -> float:
    return float(sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor)))


def _activations(recipe: Recipe, model: nn.Module, blocks: list[nn.Module], batch: MicroBatch) -> tuple[float, float]:
    """Bytes that a forward pass keeps for the backward pass, parameters apart, and bytes of a block's output."""
    kept: dict[int, float] = {}
    outputs: list[float] = [0.0]
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = float(storage.nbytes())
        return tensor

    def note(_: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(_bytes(output if isinstance(output, tuple) else [output]))

    hooks = [block.register_forward_hook(note) for block in blocks]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = recipe.loss(model, batch.data)
    for hook in hooks:
        hook.remove()
    del loss
    return sum(kept.values()), max(outputs)
