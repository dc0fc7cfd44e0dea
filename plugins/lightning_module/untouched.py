"""Reject modules whose hooks change weights, gradients or learning rates themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.core import ConfigError

PARAMETER_REMEDY = (
    ": both run once per micro-batch, and parameters may be sharded. Change parameters in a hook that "
    "configure_optimizers registers with optimizer.register_step_post_hook."
)


@final
@dataclass(frozen=True)
class _Seen:
    """A parameter and its gradient, with their version counters."""

    parameter: nn.Parameter
    version: int
    gradient: Tensor | None
    gradient_version: int

    @staticmethod
    def from_parameter(parameter: nn.Parameter) -> _Seen:
        gradient = parameter.grad
        return _Seen(parameter, parameter._version, gradient, 0 if gradient is None else gradient._version)


@final
class Untouched:
    """Checks that parameters, gradients and optimizer settings do not change between updates."""

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
        self._seen: list[_Seen] = []
        self._settings: dict[str, dict[tuple[int, str], Any]] = {}

    def record_state(self) -> None:
        """Record the parameters and their gradients, with the versions of both, and the optimizer settings."""
        with torch._C.DisableTorchFunction():  # the GradientGuard applies only to the module's code
            self._seen = [_Seen.from_parameter(parameter) for parameter in self._model.parameters()]
        self.begin_settings()

    def begin_settings(self) -> None:
        """Record the optimizer settings, after a schedule has changed them."""
        self._settings = {name: _settings(optimizer) for name, optimizer in self._optimizers.items()}

    def check_state(self) -> None:
        """Compare with the state recorded by :meth:`record_state`, and clear it.

        Raises:
            ConfigError: a parameter, a gradient or an optimizer setting was replaced or changed.
        """
        seen, self._seen = self._seen, []
        with torch._C.DisableTorchFunction():
            for before in seen:
                self._check_unchanged(before, _Seen.from_parameter(before.parameter))
        self.check_settings()

    def check_settings(self) -> None:
        """Raise ConfigError if optimizer settings have changed since :meth:`begin_settings`."""
        for name, before in self._settings.items():
            now = _settings(self._optimizers[name])
            for place, key in sorted(before.keys() | now.keys()):
                value, others = before.get((place, key)), now.get((place, key))
                if others is not value and others != value:
                    raise ConfigError(
                        f"training_step and on_train_epoch_end must not change {key!r} of optimizer {name!r}: both "
                        "run once per micro-batch. Return a schedule from configure_optimizers, such as "
                        "torch.optim.lr_scheduler.LambdaLR, and step it."
                    )

    def _check_unchanged(self, before: _Seen, now: _Seen) -> None:
        if now.version != before.version:
            raise ConfigError(
                "training_step and on_train_epoch_end must not change "
                f"{self._describe_parameter(before.parameter)}{PARAMETER_REMEDY}"
            )
        if now.gradient is not before.gradient or now.gradient_version != before.gradient_version:
            raise ConfigError(
                "training_step and on_train_epoch_end must not call loss.backward() or change the gradient of "
                f"{self._describe_parameter(before.parameter)}. Call self.manual_backward(loss) and zero_grad() "
                "of the optimizer, and use optimizer.register_step_pre_hook for other changes."
            )

    def _describe_parameter(self, parameter: nn.Parameter) -> str:
        names = (f"the parameter {name!r}" for name, each in self._model.named_parameters() if each is parameter)
        return next(names, "a parameter")


def _settings(optimizer: Optimizer) -> dict[tuple[int, str], Any]:
    """Return the settings of an optimizer's groups; tensors as (identity, version)."""
    return {
        (place, name): (id(value), value._version) if isinstance(value, Tensor) else value
        for place, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }
