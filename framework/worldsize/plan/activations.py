"""Measures what a forward pass keeps for the backward pass, and derives what it keeps with activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from worldsize.core import Numerics
from worldsize.strategies.recomputed import kept_operations


@final
@dataclass(frozen=True)
class Activations:
    """Bytes of a micro-batch's activations, without parameters.

    Attributes:
        total: All of them.
        blocks: Those that each block keeps.
        products: Those that each block keeps with ``activation_checkpointing=selective``.
        boundary: The largest output of a block.
    """

    total: float
    blocks: Sequence[float]
    products: Sequence[float]
    boundary: float

    def largest(self, numerics: Numerics) -> float:
        """Return the bytes on the device when the backward pass begins, or within it, as ``numerics`` says.

        A block that is computed again, or brought back from the host, is there as a whole. Without blocks, those that
        are moved to the host come back one by one, and are left out.
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


def measured_activations(model: nn.Module, blocks: Sequence[nn.Module], forward: Callable[[], object]) -> Activations:
    """Measure ``forward``, which calls ``model``; ``blocks`` are its repeated parts."""
    counter = _Counter({parameter.untyped_storage().data_ptr() for parameter in model.parameters()})
    hooks = [block.register_forward_pre_hook(counter.entered) for block in blocks]
    hooks += [block.register_forward_hook(counter.left) for block in blocks]
    try:
        with torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda tensor: tensor), _Products(counter):
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
    """Counts saved storages by block; the first entry is for what is outside of blocks."""

    parameters: set[int]
    kept: list[dict[int, float]] = field(default_factory=lambda: [{}])
    products: list[float] = field(default_factory=list)
    outputs: list[float] = field(default_factory=list)
    is_inside: bool = False

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self.parameters and not any(address in kept for kept in self.kept):
            self.kept[-1 if self.is_inside else 0][address] = float(storage.nbytes())
        return tensor

    def entered(self, *_: Any) -> None:
        self.is_inside = True
        self.kept.append({})
        self.products.append(0.0)

    def left(self, _: nn.Module, inputs: Any, output: Any) -> None:
        self.is_inside = False
        self.outputs.append(_bytes(output))


@final
class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the results that selective checkpointing keeps, in blocks."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **kwargs or {})
        if self._counter.is_inside and kept_operations(None, func, *args, **kwargs or {}) is CheckpointPolicy.MUST_SAVE:
            self._counter.products[-1] += _bytes(made)
        return made


def _bytes(tree: Any) -> float:
    return float(sum(each.nbytes for each in tree_leaves(tree) if isinstance(each, Tensor)))
