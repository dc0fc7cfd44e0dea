"""Tries an optimizer's hooks before a run, to see which tensors they compute with.

A hook such as one that averages weights is anyone's code, and some strategies cannot carry all that it may do: where
weights are divided over ranks, torch has no operation that takes a part of one and a whole tensor together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worldsize.core import ConfigError, MultiUpdateRecipe, Recipe
from worldsize.optimizers.names import named_by
from worldsize.strategies.step_hooks import hook_name, recipe_hooks


def refuse_mixing_hooks(recipe: Recipe, model: nn.Module) -> None:
    """Refuse hooks that compute with weights and whole tensors together, such as an average in a buffer.

    What a hook makes of weights is divided as they are, and passes. A hook that cannot be tried, for example since it
    asks for the values of tensors, is left to the processes.

    Args:
        recipe: Makes the optimizer and its hooks.
        model: Its model, whose tensors may be on the meta device; the hooks may change them.

    Raises:
        ConfigError: a hook does so.
    """
    for name, tensor in _mixed_operands(recipe, model, list(model.parameters()), _beside):
        buffers = [each for each, buffer in model.named_buffers() if _memory(buffer) == _memory(tensor)]
        described = f"the buffer {buffers[0]}" if buffers else f"a tensor {list(tensor.shape)} that is not made of them"
        raise ConfigError(
            f"the optimizer has a hook for each step, {name}, that computes with weights and {described} together. "
            "Here weights are divided over ranks, and such a tensor is whole on each. Keep it as a frozen parameter, "
            "nn.Parameter(..., requires_grad=False), which is divided alike; set ema.decay for an average of all "
            "weights; or use strategy=ddp or zero."
        )


def refuse_hooks_on(tables: Mapping[str, Tensor], recipe: Recipe, model: nn.Module) -> None:
    """Refuse hooks that compute with ``tables``, weights (rows, dim) by name whose rows are only on servers.

    Raises:
        ConfigError: a hook does so.
    """
    names = {_memory(table): name for name, table in tables.items()}
    for name, table in _mixed_operands(recipe, model, list(tables.values()), _itself):
        table_name = names.get(_memory(table), "a table")
        raise ConfigError(
            f"the optimizer has a hook for each step, {name}, that computes with {table_name}, "
            "whose rows are on servers. Leave it out, set sparse=False of that embedding, or use strategy=ddp."
        )


_Find = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]  # among marked tensors and others of an operation


def _beside(marked: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    return [each for each in others if each.numel() != 1]  # a scalar goes with any


def _itself(marked: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    return list(marked)


def _mixed_operands(
    recipe: Recipe, model: nn.Module, marked: Sequence[Tensor], find: _Find
) -> list[tuple[str, Tensor]]:
    """Try the recipe's hooks, and return what ``find`` takes of their operations, each with the hook's name."""
    watch, operands = _Watch(marked, find), list[tuple[str, Tensor]]()
    with torch.no_grad(), named_by(model), watch:
        made: Any = recipe.optimizers(model) if isinstance(recipe, MultiUpdateRecipe) else recipe.optimizer(model)
        for optimizer in made.values() if isinstance(made, Mapping) else [made]:
            for hook in recipe_hooks(optimizer):
                watch.operands = []
                with suppress(Exception):  # anyone's code; and no parameter has a gradient
                    hook(optimizer, (), {})
                operands += [(hook_name(hook), tensor) for tensor in watch.operands]
    return operands


@final
class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks what is computed of marked tensors, and shows ``find`` each operation with one of them.

    Tensors count as the same if they share their memory, as views do.
    """

    def __init__(self, marked: Sequence[Tensor], find: _Find) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operands: list[Tensor] = []
        self._find = find
        self._marked: dict[int, Tensor] = {}  # kept, so that no other tensor takes their place in memory
        self._mark(marked)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        marked = [tensor for tensor in tensors if _memory(tensor) in self._marked]
        others = [tensor for tensor in tensors if _memory(tensor) not in self._marked]
        out = func(*args, **(kwargs or {}))
        if marked:
            self.operands += self._find(marked, others)
            self._mark([leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
        return out

    def _mark(self, tensors: Sequence[Tensor]) -> None:
        self._marked.update((_memory(tensor), tensor) for tensor in tensors)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
