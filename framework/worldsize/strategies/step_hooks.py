"""Optimizer step hooks of recipes, such as weight averaging, and of strategies.

torch does not have a public API to list hooks, so this module reads private attributes of torch 2.

A recipe's hooks are tried before a run, to find the tensors that they compute with. Hooks are user code, and some
strategies do not support everything that they may do. For example, if weights are sharded over ranks, torch operations
do not mix a shard with an unsharded tensor.
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

from worldsize.core import ConfigError, Recipe
from worldsize.optimizers.groups import use_parameter_names


@final
@dataclass(frozen=True)
class StrategyHook:
    """A hook that a strategy added to the recipe's optimizer, and that must run in every step."""

    run: Callable[[], None]

    def __call__(self, *_: object) -> None:
        self.run()


def enclose_steps(optimizer: Optimizer, enter: Callable[[], None], leave: Callable[[], None]) -> None:
    """Call ``enter`` right before and ``leave`` right after optimizer steps, inside other hooks."""
    depth = 0  # hooks run twice per step if both a class and its base class have hooked steps

    def enter_outermost() -> None:
        nonlocal depth
        depth += 1
        if depth == 1:
            enter()

    def leave_outermost() -> None:
        nonlocal depth
        depth -= 1
        if depth == 0:
            leave()

    optimizer.register_step_pre_hook(StrategyHook(enter_outermost))
    last = optimizer.register_step_post_hook(StrategyHook(leave_outermost))
    hooks = optimizer._optimizer_step_post_hooks
    for key in [key for key in hooks if key != last.id]:  # move earlier hooks behind it
        hooks[key] = hooks.pop(key)


@contextmanager
def disable_recipe_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Disable the recipe's hooks within the context, e.g. for steps that only create state."""
    before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    with _disable_hooks(before), _disable_hooks(after):
        yield


@contextmanager
def _disable_hooks(hooks: dict[int, Callable[..., Any]]) -> Iterator[None]:
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
        ConfigError: the optimizer has a recipe's hook; ``because``: the reason at the end of the message.
    """
    if hooks := recipe_hooks(optimizer):
        raise ConfigError(f"the optimizer has a step hook, {hook_name(hooks[0])}, {because}")


def wrap_recipe_hooks(optimizer: Optimizer, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace each of the recipe's hooks with the result of ``wrap`` for it."""
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for key, hook in hooks.items():
            if not isinstance(hook, StrategyHook):
                hooks[key] = wrap(hook)


def recipe_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the recipe's pre-step hooks, then its post-step hooks."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return [hook for hook in hooks if not isinstance(hook, StrategyHook)]


def hook_name(hook: Callable[..., Any]) -> str:
    """Return the name of ``hook`` for messages."""
    return getattr(hook, "__qualname__", type(hook).__name__)


def refuse_mixing_hooks(recipe: Recipe, model: nn.Module) -> None:
    """Refuse hooks that mix sharded weights with unsharded tensors.

    An example of such a tensor is a buffer of averages. Tensors that a hook computes from weights are sharded like
    them, and are allowed. A hook that fails in the trial, for example because it reads tensor values, is not refused
    here but may fail during training.

    Args:
        recipe: Creates the optimizer and its hooks.
        model: The recipe's model, whose tensors may be on the meta device; the hooks may change them.

    Raises:
        ConfigError: a hook mixes both in one operation.
    """
    for name, tensor in _find_mixed_operands(recipe, model, list(model.parameters()), _select_others):
        buffers = [
            each for each, buffer in model.named_buffers() if _get_storage_key(buffer) == _get_storage_key(tensor)
        ]
        described = f"the buffer {buffers[0]}" if buffers else f"an unsharded tensor of shape {list(tensor.shape)}"
        raise ConfigError(
            f"the optimizer has a step hook, {name}, that combines sharded weights with {described}. Keep the tensor "
            "as a frozen parameter, nn.Parameter(..., requires_grad=False), so that it is sharded like the weights; "
            "set ema.decay to average all weights; or use strategy=ddp or zero."
        )


def refuse_hooks_on(tables: Mapping[str, Tensor], recipe: Recipe, model: nn.Module) -> None:
    """Refuse hooks on ``tables``, weights (rows, dim) by name, with rows only on servers.

    Raises:
        ConfigError: a hook computes with one of them.
    """
    names = {_get_storage_key(table): name for name, table in tables.items()}
    for name, table in _find_mixed_operands(recipe, model, list(tables.values()), _select_marked):
        table_name = names.get(_get_storage_key(table), "a table")
        raise ConfigError(
            f"the optimizer has a step hook, {name}, that uses {table_name}, but its rows are on servers. Remove the "
            "hook, set sparse=False for the embedding, or use strategy=ddp."
        )


_Find = Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]  # takes the marked and other arguments


def _select_others(marked: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    return [each for each in others if each.numel() != 1]  # scalars mix with any tensor


def _select_marked(marked: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    return list(marked)


def _find_mixed_operands(
    recipe: Recipe, model: nn.Module, marked: Sequence[Tensor], find: _Find
) -> list[tuple[str, Tensor]]:
    """Try the recipe's hooks; return the operands that ``find`` selects, with hook names."""
    watch, operands = _Watch(marked, find), list[tuple[str, Tensor]]()
    with torch.no_grad(), use_parameter_names(model), watch:
        for optimizer in recipe.optimizers(model).values():
            for hook in recipe_hooks(optimizer):
                watch.operands = []
                with suppress(Exception):  # user code, and parameters lack gradients here
                    hook(optimizer, (), {})
                operands += [(hook_name(hook), tensor) for tensor in watch.operands]
    return operands


@final
class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks tensors computed from marked ones, and calls ``find`` for each operation with one.

    Tensors that share memory, such as views, count as the same.
    """

    def __init__(self, marked: Sequence[Tensor], find: _Find) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operands: list[Tensor] = []
        self._find = find
        self._marked: dict[int, Tensor] = {}  # kept alive, so that their memory is not reused
        self._mark_tensors(marked)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        marked = [tensor for tensor in tensors if _get_storage_key(tensor) in self._marked]
        others = [tensor for tensor in tensors if _get_storage_key(tensor) not in self._marked]
        out = func(*args, **(kwargs or {}))
        if marked:
            self.operands += self._find(marked, others)
            self._mark_tensors([leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)])
        return out

    def _mark_tensors(self, tensors: Sequence[Tensor]) -> None:
        self._marked.update((_get_storage_key(tensor), tensor) for tensor in tensors)


def _get_storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
