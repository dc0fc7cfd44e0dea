"""Runs the hooks that a recipe has registered on parameters once a step, on the gradient of the whole step.

Autograd would call them for each micro-batch and process with a part of the gradient: a hook that clips it would give
another result, and one that acts on accumulated gradients would act too often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError

_Hooks = dict[int, Callable[..., Any]]  # torch's, by the key of a handle, which can remove it


@final
class GradientHooks:
    """The hooks of ``register_hook`` and ``register_post_accumulate_grad_hook`` on ``parameters``.

    Torch has no public access to them; their two dictionaries are those of torch 2.1 to 2.15.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Keep autograd from calling hooks inside the context, which may remove hooks.

        Raises:
            ConfigError: a hook was registered inside the context, where it was called with parts of a gradient.
        """
        tables = [table for parameter in self._parameters for table in _tables(parameter) if table]
        kept = [dict(table) for table in tables]
        for table in tables:
            table.update(dict.fromkeys(table, _do_nothing))  # keeps the keys, by which handles remove hooks
        try:
            yield
            if any(
                hook is not _do_nothing
                for each in self._parameters
                for table in _tables(each)
                for hook in table.values()
            ):
                raise ConfigError(
                    "a hook on the gradient of a parameter was registered while a loss was computed. Register it when "
                    "the model or the optimizer is made: it is then called once a step, with the whole gradient."
                )
        finally:
            for table, hooks in zip(tables, kept, strict=True):
                table.update({key: hook for key, hook in hooks.items() if key in table})

    def run(self, parameters: Sequence[nn.Parameter]) -> None:
        """Call the hooks of those of ``parameters`` that have a gradient, with it, in the order of a backward pass."""
        for parameter in reversed(parameters):
            before, after = _tables(parameter)
            if (before or after) and parameter.grad is not None:
                _call(parameter, list(before.values()), list(after.values()))


def _do_nothing(_: Tensor) -> None:
    """Stand for a hook that is suspended."""


def _tables(parameter: Tensor) -> tuple[_Hooks, _Hooks]:
    return parameter._backward_hooks or {}, getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


@torch.no_grad()
def _call(parameter: nn.Parameter, before: Sequence[Callable[..., Any]], after: Sequence[Callable[..., Any]]) -> None:
    for hook in before:
        gradient = parameter.grad
        assert gradient is not None
        changed = hook(gradient)
        if changed is not None and changed is not gradient:
            gradient.copy_(changed)  # in place, since it may be a part of a bucket
    for hook in after:
        hook(parameter)
