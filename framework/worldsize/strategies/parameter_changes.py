"""Parameters that are frozen, unfrozen or hooked while a run trains, and the hooks on their gradients.

A strategy that prepared for other parameters refuses such changes. Hooks that a recipe has registered on parameters
run once a step, on the gradient of the whole step: autograd would call them for each micro-batch and process with a
part of the gradient. A hook that clips it would give another result, and one that acts on accumulated gradients would
act too often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError
from worldsize.strategies.gradient_reducer import listed


def hook_count(parameter: Tensor) -> int:
    """Return the number of hooks on the gradient of ``parameter``, of any shape, by both of torch's methods."""
    return len(parameter._backward_hooks or ()) + len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Refuse hooks on the gradients of parameters, where no rank has a whole gradient of the step.

    Raises:
        ConfigError: a parameter has a hook of ``register_hook`` or ``register_post_accumulate_grad_hook``.
    """
    if names := [name for name, parameter in model.named_parameters() if hook_count(parameter)]:
        raise hooked(names)


def hooked(names: list[str]) -> ConfigError:
    """Return the error for parameters with a hook on a gradient that no process has as a whole."""
    return ConfigError(
        f"there is a hook on the gradient of {listed(names)}, and this strategy divides gradients over processes: none "
        "has the whole gradient of a step, which the hook expects. Use strategy=ddp, zero or single, or make the "
        "change where the loss is computed."
    )


def switched(unfrozen: list[str], frozen: list[str]) -> ConfigError:
    """Return the error for parameters that require gradients now and did not before, or the other way round."""
    done = f"unfrozen {listed(unfrozen)}" if unfrozen else f"frozen {listed(frozen)}"
    return ConfigError(
        f"training has {done}, and this strategy divides its work by the parameters that require gradients when a run "
        "begins. Let them require gradients in all steps, with a learning rate of 0 while they are frozen (a parameter "
        "group of their own, and a schedule); or use strategy=single, or a new run from the checkpoint."
    )


@final
class ParameterChanges:
    """Compares the parameters of ``model`` with what they were when this object was made.

    ``hooks``: whether hooks on gradients are a change, too.
    """

    def __init__(self, model: nn.Module, *, hooks: bool) -> None:
        self._named = dict(model.named_parameters())
        self._parameters = list(self._named.values())
        self._hooks = hooks
        self._trained = [each.requires_grad for each in self._parameters]
        self._hooked = [hook_count(each) for each in self._parameters]

    def check(self) -> None:
        """Check all parameters; a look at each takes a fraction of a microsecond.

        Raises:
            ConfigError: a parameter was frozen or unfrozen, or has other hooks.
        """
        if [each.requires_grad for each in self._parameters] != self._trained:
            raise self._refrozen()
        if self._hooks and [hook_count(each) for each in self._parameters] != self._hooked:
            pairs = zip(self._named, self._parameters, self._hooked, strict=True)
            raise hooked([name for name, each, count in pairs if hook_count(each) != count])

    def _refrozen(self) -> ConfigError:
        pairs = list(zip(self._named, self._parameters, self._trained, strict=True))
        frozen = [name for name, each, trained in pairs if trained and not each.requires_grad]
        unfrozen = [name for name, each, trained in pairs if not trained and each.requires_grad]
        return switched(unfrozen, frozen)


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
