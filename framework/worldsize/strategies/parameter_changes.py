"""Detection of parameters frozen, unfrozen or hooked during a run, and gradient hooks.

Strategies prepare for a fixed set of trained parameters, and refuse changes to it. Hooks that a recipe registers on
parameters run once per step, with the gradient of the whole step. Autograd would instead call them for each
micro-batch and process, with a part of the gradient: a hook that clips would give different results, and a hook on
accumulated gradients would run too often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError
from worldsize.strategies.gradient_reducer import format_names


def hook_count(parameter: Tensor) -> int:
    """Return the number of gradient hooks of both kinds on ``parameter``, of any shape."""
    return len(parameter._backward_hooks or ()) + len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Refuse gradient hooks, for strategies in which no rank has a whole gradient of the step.

    Raises:
        ConfigError: a parameter has a hook from ``register_hook`` or ``register_post_accumulate_grad_hook``.
    """
    if names := [name for name, parameter in model.named_parameters() if hook_count(parameter)]:
        raise build_hook_error(names)


def build_hook_error(names: list[str]) -> ConfigError:
    """Return the error for hooks on gradients that are sharded over processes."""
    return ConfigError(
        f"gradient hooks are not supported on sharded gradients; found a hook on {format_names(names)}. Use "
        "strategy=ddp, zero or single, or apply the change to the loss."
    )


def build_freeze_error(unfrozen: list[str], frozen: list[str]) -> ConfigError:
    """Return the error for parameters whose ``requires_grad`` has changed."""
    done = f"unfrozen {format_names(unfrozen)}" if unfrozen else f"frozen {format_names(frozen)}"
    return ConfigError(
        f"training has {done}, but this strategy does not support changes of requires_grad during a run. Keep "
        "requires_grad=True and use a learning rate of 0 while parameters are frozen (with a separate parameter group "
        "and a schedule), use strategy=single, or start a new run from the checkpoint."
    )


@final
class ParameterChanges:
    """Detects parameters of ``model`` frozen or unfrozen since this object was created.

    ``hooks``: whether to detect added or removed gradient hooks, too.
    """

    def __init__(self, model: nn.Module, *, hooks: bool) -> None:
        self._named = dict(model.named_parameters())
        self._parameters = list(self._named.values())
        self._hooks = hooks
        self._trained = [each.requires_grad for each in self._parameters]
        self._hooked = [hook_count(each) for each in self._parameters]

    def check(self) -> None:
        """Check all parameters, in less than a microsecond per parameter.

        Raises:
            ConfigError: a parameter was frozen or unfrozen, or its hooks changed.
        """
        if [each.requires_grad for each in self._parameters] != self._trained:
            raise self._refrozen()
        if self._hooks and [hook_count(each) for each in self._parameters] != self._hooked:
            pairs = zip(self._named, self._parameters, self._hooked, strict=True)
            raise build_hook_error([name for name, each, count in pairs if hook_count(each) != count])

    def _refrozen(self) -> ConfigError:
        pairs = list(zip(self._named, self._parameters, self._trained, strict=True))
        frozen = [name for name, each, trained in pairs if trained and not each.requires_grad]
        unfrozen = [name for name, each, trained in pairs if not trained and each.requires_grad]
        return build_freeze_error(unfrozen, frozen)


_Hooks = dict[int, Callable[..., Any]]  # torch's hook table, by the key of each removable handle


@final
class GradientHooks:
    """Hooks from ``register_hook`` and ``register_post_accumulate_grad_hook`` on ``parameters``.

    They have no public API in torch; their two private dictionaries exist in torch 2.1 to 2.15.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters

    @contextmanager
    def suspend_hooks(self) -> Iterator[None]:
        """Suspend hooks within the context; they may be removed meanwhile.

        Raises:
            ConfigError: a hook was registered within the context; it may have been called with partial gradients.
        """
        tables = [table for parameter in self._parameters for table in _get_hook_tables(parameter) if table]
        kept = [dict(table) for table in tables]
        for table in tables:
            table.update(dict.fromkeys(table, _do_nothing))  # keep the keys, which handles use to remove hooks
        try:
            yield
            if any(
                hook is not _do_nothing
                for each in self._parameters
                for table in _get_hook_tables(each)
                for hook in table.values()
            ):
                raise ConfigError(
                    "a gradient hook was registered on a parameter while computing the loss. Register the hook when "
                    "creating the model or the optimizer; the hook is then called once per step, with the full "
                    "gradient."
                )
        finally:
            for table, hooks in zip(tables, kept, strict=True):
                table.update({key: hook for key, hook in hooks.items() if key in table})

    def run(self, parameters: Sequence[nn.Parameter]) -> None:
        """Call the hooks of those ``parameters`` that have gradients, in backward order."""
        for parameter in reversed(parameters):
            before, after = _get_hook_tables(parameter)
            if (before or after) and parameter.grad is not None:
                _call_hooks(parameter, list(before.values()), list(after.values()))


def _do_nothing(_: Tensor) -> None:
    """Stand in for a suspended hook."""


def _get_hook_tables(parameter: Tensor) -> tuple[_Hooks, _Hooks]:
    return parameter._backward_hooks or {}, getattr(parameter, "_post_accumulate_grad_hooks", None) or {}


@torch.no_grad()
def _call_hooks(
    parameter: nn.Parameter, before: Sequence[Callable[..., Any]], after: Sequence[Callable[..., Any]]
) -> None:
    for hook in before:
        gradient = parameter.grad
        assert gradient is not None
        changed = hook(gradient)
        if changed is not None and changed is not gradient:
            gradient.copy_(changed)  # in place, since it may be a view of a bucket
    for hook in after:
        hook(parameter)
