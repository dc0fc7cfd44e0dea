"""Refuses a training step that itself changes what optimizers and schedules change: weights, gradients and rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ConfigError

PARAMETER_REMEDY = (
    ", once for each micro-batch of a step, and a strategy may have divided it. Change parameters in a hook of the "
    "optimizer, in configure_optimizers: optimizer.register_step_post_hook."
)


@final
@dataclass(frozen=True)
class _Seen:
    """A parameter and its gradient, with their versions, which count changes in place."""

    parameter: nn.Parameter
    version: int
    gradient: Tensor | None
    gradient_version: int

    @staticmethod
    def of(parameter: nn.Parameter) -> _Seen:
        gradient = parameter.grad
        return _Seen(parameter, parameter._version, gradient, 0 if gradient is None else gradient._version)


@final
class Untouched:
    """The parameters, gradients and settings of optimizers between two updates, which a training step leaves alone."""

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self._seen: list[_Seen] = []
        self._settings: dict[str, dict[tuple[int, str], Any]] = {}

    def begin(self) -> None:
        """Remember the parameters, their gradients and the versions of both."""
        with torch._C.DisableTorchFunction():  # a GradientGuard is for the module
            self._seen = [_Seen.of(parameter) for parameter in self._model.parameters()]
        self.begin_settings()

    def begin_settings(self) -> None:
        """Remember the settings of the optimizers, as a schedule has left them."""
        self._settings = {name: _settings(optimizer) for name, optimizer in self._optimizers.items()}

    def end(self) -> None:
        """Compare with what :meth:`begin` remembered, and forget that.

        Raises:
            ConfigError: a parameter or a gradient has been replaced or changed.
        """
        seen, self._seen = self._seen, []
        with torch._C.DisableTorchFunction():
            for before in seen:
                self._compare(before, _Seen.of(before.parameter))
        self.check_settings()

    def check_settings(self) -> None:
        """Raise ConfigError if the settings of an optimizer have changed since :meth:`begin_settings`."""
        for name, before in self._settings.items():
            now = _settings(self._optimizers[name])
            for place, key in sorted(before.keys() | now.keys()):
                value, others = before.get((place, key)), now.get((place, key))
                if others is not value and others != value:
                    raise ConfigError(
                        f"training_step changes {key!r} of the optimizer {name!r}, once for each micro-batch of a "
                        "step. Let configure_optimizers return a schedule that does it, such as "
                        "torch.optim.lr_scheduler.LambdaLR, and advance that."
                    )

    def _compare(self, before: _Seen, now: _Seen) -> None:
        if now.version != before.version:
            raise ConfigError(f"training_step changes {self._name(before.parameter)}{PARAMETER_REMEDY}")
        if now.gradient is not before.gradient or now.gradient_version != before.gradient_version:
            raise ConfigError(
                f"training_step calls loss.backward(), or changes the gradient of {self._name(before.parameter)} in "
                "another way. Call self.manual_backward(loss), and zero_grad() of the optimizer itself; leave the rest "
                "to a hook of the optimizer: register_step_pre_hook."
            )

    def _name(self, parameter: nn.Parameter) -> str:
        names = (f"the parameter {name!r}" for name, each in self._model.named_parameters() if each is parameter)
        return next(names, "a parameter")


def _settings(optimizer: Optimizer) -> dict[tuple[int, str], Any]:
    """Return what an optimizer's groups say of their parameters; of a tensor, which one and its version."""
    return {
        (place, name): (id(value), value._version) if isinstance(value, Tensor) else value
        for place, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }
