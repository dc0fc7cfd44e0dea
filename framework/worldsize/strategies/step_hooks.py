"""The hooks that an optimizer runs before and after each step: the recipe's, such as one that averages weights, and a
strategy's.

torch shows them in no public way; the names that are read here are those of torch 2.
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
    """A hook that a strategy has added to the recipe's optimizer, without which no step succeeds."""

    run: Callable[[], None]

    def __call__(self, *_: object) -> None:
        self.run()


def move_step_hooks(source: Optimizer, target: Optimizer) -> None:
    """Let ``target``, which stands in for ``source``, run the hooks that ``source`` has before and after each step."""
    for before in source._optimizer_step_pre_hooks.values():
        target.register_step_pre_hook(before)
    for after in source._optimizer_step_post_hooks.values():
        target.register_step_post_hook(after)


@contextmanager
def without_recipe_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Leave the recipe's hooks out of steps within the context, such as the one that torch takes to make a state."""
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
    """Refuse an optimizer that runs something before or after its steps.

    Raises:
        ConfigError: it has a hook; the message goes on with the reason ``because``.
    """
    if hooks := recipe_hooks(optimizer):
        raise ConfigError(f"the optimizer has a hook for each step, {hook_name(hooks[0])}, {because}")


def recipe_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return what the recipe lets the optimizer run before and after each step, in this order."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return [hook for hook in hooks if not isinstance(hook, StrategyHook)]


def hook_name(hook: Callable[..., Any]) -> str:
    """Return how a message names ``hook``."""
    return getattr(hook, "__qualname__", type(hook).__name__)
