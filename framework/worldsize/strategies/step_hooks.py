"""The hooks that a recipe has given its optimizer, such as one that averages weights after each step.

torch shows them in no public way; the names that are read here are those of torch 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from worldsize.core import ConfigError


def move_step_hooks(source: Optimizer, target: Optimizer) -> None:
    """Let ``target``, which stands in for ``source``, run the hooks that ``source`` has before and after each step."""
    for before in source._optimizer_step_pre_hooks.values():
        target.register_step_pre_hook(before)
    for after in source._optimizer_step_post_hooks.values():
        target.register_step_post_hook(after)


@contextmanager
def without_step_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Run no hook of ``optimizer`` within the context: of a new one torch takes a step to find out its state."""
    before, after = dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)
    optimizer._optimizer_step_pre_hooks.clear()
    optimizer._optimizer_step_post_hooks.clear()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks.update(before)
        optimizer._optimizer_step_post_hooks.update(after)


def refuse_step_hooks(optimizer: Optimizer, *, because: str) -> None:
    """Refuse an optimizer that runs something before or after its steps.

    Raises:
        ConfigError: it has a hook; the message goes on with the reason ``because``.
    """
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    if hooks:
        name = getattr(hooks[0], "__qualname__", type(hooks[0]).__name__)
        raise ConfigError(f"the optimizer has a hook for each step, {name}, {because}")
