"""Hooks that an optimizer runs before and after each step: those of a recipe, such as weight averaging, and strategies.

torch has no public access to them; this module reads private attributes of torch 2.

A recipe's hooks are tried before a run, to see which tensors they compute with. A hook such as one that averages
weights is anyone's code, and some strategies cannot carry all that it may do: where weights are divided over ranks,
torch has no operation that takes a part of one and a whole tensor together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from worldsize.core import ConfigError, MultiUpdateRecipe, Recipe
from worldsize.optimizers.groups import named_by


@final
@dataclass(frozen=True)
class StrategyHook:
    """A hook that a strategy has added to the recipe's optimizer, and that every step needs."""

    run: Callable[[], None]

    def __call__(self, *_: object) -> None:
        self.run()


def enclose_steps(optimizer: Optimizer, enter: Callable[[], None], leave: Callable[[], None]) -> None:
    """Call ``enter`` right before each step of ``optimizer`` and ``leave`` right after it, inside all other hooks."""
    depth = 0  # if a class and its base class have hooked steps, hooks run twice in a step

    def before() -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            enter()

    def after() -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            leave()

    optimizer.register_step_pre_hook(StrategyHook(before))
    last = optimizer.register_step_post_hook(StrategyHook(after))
    hooks = optimizer._optimizer_step_post_hooks
    for key in [key for key in hooks if key != last.id]:  # those that were there run after it
        hooks[key] = hooks.pop(key)


@contextmanager
def without_recipe_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Disable the recipe's hooks within the context, e.g. for the step that torch takes to create optimizer state."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    with _without_recipes(before), _without_recipes(after):
        yield


@contextmanager
def _without_recipes(hooks: dict[int, Callable[..., Any]]) -> Iterator[None]:
    kept = dict(hooks)
    for key, hook in kept.items():
        if not isinstance(hook, StrategyHook):
            del hooks[key]
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(kept)


def refuse_step_hooks(optimizer: Optimizer, *, because: str) -> None:
    """Refuse an optimizer that has step hooks.

    Raises:
        ConfigError: the optimizer has a hook; the message ends with the reason ``because``.
    """
    if hooks := recipe_hooks(optimizer):
        raise ConfigError(f"the optimizer has a hook for each step, {hook_name(hooks[0])}, {because}")


def wrap_recipe_hooks(optimizer: Optimizer, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace each of the recipe's hooks by what ``wrap`` makes of it."""
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for key, hook in hooks.items():
            if not isinstance(hook, StrategyHook):
                hooks[key] = wrap(hook)


def recipe_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return what the recipe lets the optimizer run before and after each step, in this order."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return [hook for hook in hooks if not isinstance(hook, StrategyHook)]


def hook_name(hook: Callable[..., Any]) -> str:
    """Return how a message names ``hook``."""
    return getattr(hook, "__qualname__", type(hook).__name__)


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
