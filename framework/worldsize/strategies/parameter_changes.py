"""Detects parameters that are frozen, unfrozen or hooked while a run trains, where a strategy prepared for others."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from worldsize.core import ConfigError
from worldsize.strategies.unused_parameters import listed


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
