"""Flips configured bits of a process, as a failing processor or memory would.

    train.py cluster.processes=4 reproducibility=elastic integrity.audit=1 \\
        'faults=[{action: flip, target: gradient, rank: 1, step: 7}]'

Targets: batch (the data of a micro-batch), weight (in memory, before the step), activation (a module's output), product
(the result of a matrix product, in the forward or backward pass), gradient (of a parameter, in one pass), and optimizer
(its state, after the update).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from worldsize.collectives.per_rank import get_local_shard
from worldsize.core import BitFlips, FlipTarget
from worldsize.core.limits import COUNT, Range

_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.convolution.default,
    torch.ops.aten.convolution_backward.default,
}


@final
@dataclass(frozen=True)
class Flip:
    """A bit to flip; the fields that are None are drawn from the rank and the step.

    Attributes:
        target: The kind of value.
        name: Name of the tensor or module; None: drawn from all of the target.
        index: Element of the tensor, counted over its shard on this process, modulo its size.
        bit: Bit of the element, from the lowest, modulo its number of bits.
        skip: Number of values of the target to leave unchanged first.
        repeats: Whether further values are changed from then on, in this and all later steps.
        every: If it repeats, only one of this many values is changed.
    """

    target: FlipTarget
    name: str | None = None
    index: Annotated[int | None, Range(least=0)] = None
    bit: Annotated[int | None, Range(least=0, most=63)] = None
    skip: Annotated[int, Range(least=0)] = 0
    repeats: bool = False
    every: Annotated[int, COUNT] = 1


@final
class PlannedFlip:
    """A flip in a process, with the number of values that it has seen."""

    def __init__(self, flip: Flip, step: int | None, seed: str) -> None:
        self.flip, self._step = flip, step
        self._random = random.Random(seed)
        self._seen = 0
        self._is_done = False
        self._module: str | None = flip.name

    def is_due(self, step: int) -> bool:
        """Return whether a value of ``step`` may be changed."""
        if self._is_done or self._step is None:
            return not self._is_done
        return step >= self._step if self.flip.repeats else step == self._step

    def change(self, named: Mapping[str, Tensor]) -> None:
        """Count one value, and change it if it is its turn: a bit of one of the tensors ``named``."""
        found = {name: each.detach() for name, each in named.items() if isinstance(each, Tensor) and each.numel()}
        tensors = {name: shard for name, each in found.items() if (shard := get_local_shard(each)).numel()}
        if self.flip.name is not None:
            tensors = {name: each for name, each in tensors.items() if name == self.flip.name}
        if not tensors:
            return
        turn, self._seen = self._seen - self.flip.skip, self._seen + 1
        if turn < 0 or turn % self.flip.every:
            return
        self._is_done = not self.flip.repeats
        self._flip_bit(tensors[self._random.choice(sorted(tensors))])

    def _flip_bit(self, tensor: Tensor) -> None:
        index, bit = self.flip.index, self.flip.bit
        size = tensor.element_size()
        index = self._random.randrange(tensor.numel()) if index is None else index % tensor.numel()
        bit = self._random.randrange(8 * size) if bit is None else bit % (8 * size)
        place = tensor.storage_offset() + _find_offset(tensor, index)
        # another tensor on the same memory, so that the version counter does not change
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        memory[place * size + bit // 8] ^= 1 << bit % 8

    def draw_module(self, names: Sequence[str]) -> str:
        """Return the module whose output changes: one of ``names``, the same in all passes."""
        if self._module is None:
            self._module = self._random.choice(names)
        return self._module


def _find_offset(tensor: Tensor, index: int) -> int:
    """Return the offset in elements of element ``index``, in row-major order."""
    offset = 0
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        index, place = divmod(index, size)
        offset += place * stride
    return offset


@final
class ProcessFlips(BitFlips):
    """The flips of one process."""

    def __init__(self, planned: Sequence[PlannedFlip]) -> None:
        self._planned = planned
        self.step = 0
        """The current step."""

    def plans(self, target: FlipTarget) -> bool:
        return any(True for _ in self._list_due(target))

    def flip(self, target: FlipTarget, tensors: Mapping[str, Tensor]) -> None:
        for each in self._list_due(target):
            each.change(tensors)

    @contextmanager
    def flipping_passes(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for each in self._list_due("activation"):
                names = [name for name, module in model.named_modules() if not any(module.children())]
                module = model.get_submodule(each.draw_module(names))
                stack.callback(module.register_forward_hook(_FlippedOutput(each, self)).remove)
            if self.plans("product"):
                stack.enter_context(_FlippedProducts(self))
            yield

    def _list_due(self, target: FlipTarget) -> Iterator[PlannedFlip]:
        return (each for each in self._planned if each.flip.target == target and each.is_due(self.step))


@final
@dataclass(frozen=True)
class _FlippedOutput:
    """A forward hook that changes the first tensor of a module's output."""

    planned: PlannedFlip
    flips: ProcessFlips

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        leaves, structure = tree_flatten(output)
        place = next((place for place, each in enumerate(leaves) if isinstance(each, Tensor)), None)
        if place is None or not self.planned.is_due(self.flips.step):
            return output
        leaves[place] = leaves[place].clone()
        self.planned.change({self.planned.flip.name or "": leaves[place]})
        return tree_unflatten(leaves, structure)


@final
class _FlippedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Changes results of matrix products."""

    def __init__(self, flips: ProcessFlips) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flips = flips

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            self._flips.flip("product", {"": next(each for each in tree_leaves(result) if isinstance(each, Tensor))})
        return result
