"""Hooks that an optimizer runs before and after each step: those of a recipe, such as weight averaging, and strategies.

torch has no public access to them; this module reads private attributes of torch 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch.optim import Optimizer

from worldsize.core import ConfigError


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
