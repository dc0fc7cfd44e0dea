"""What a recipe's step needs, found out by taking a few on this machine."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from worldsize.core import MicroBatch, Numerics, Recipe, Workload, World
from worldsize.engine.data import Order, micro_batches
from worldsize.strategies.synchronous import SynchronousReplica, alone

_WARM_UP, _STEPS = 2, 5


def calibrate(recipe: Recipe, numerics: Numerics, order: Order, kind: str) -> Workload:
    """Of one logical rank's micro-batch, on one process and this machine's first device of a ``kind`` ("cpu", "cuda"):
    its ``compute_seconds`` are the median of five steps.
    """
    device = torch.device(kind)
    model = recipe.model().to(device)
    replica = alone(recipe, model, World("worker", 0, 1, 0, 1, 0, 0, device), numerics)
    batches = micro_batches(recipe.data("train"), order, device)
    times = [_timed(replica, next(batches)) for _ in range(_WARM_UP + _STEPS)]
    parameters, optimizer = list(model.parameters()), replica.optimizer
    blocks = list(recipe.blocks(model))
    activation_bytes, boundary_bytes = _activations(recipe, model, blocks, next(batches)[0])
    return Workload(
        parameter_bytes=_bytes(parameters),
        optimizer_bytes=_bytes(value for kept in optimizer.state.values() for value in kept.values()),
        unit_bytes=max((_bytes(block.parameters()) for block in blocks), default=_bytes(parameters)),
        activation_bytes=activation_bytes,
        boundary_bytes=boundary_bytes,
        blocks=len(blocks),
        compute_seconds=statistics.median(times[_WARM_UP:]),
    )


def _timed(replica: SynchronousReplica, batches: list[MicroBatch]) -> float:
    begun = time.perf_counter()
    replica.step(batches)
    if replica.world.device.type == "cuda":
        torch.cuda.synchronize()
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
