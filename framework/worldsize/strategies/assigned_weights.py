"""Carries weights that a recipe's step hooks assign as ``parameter.data = ...`` where weights are divided over ranks.

Many programs write their moving averages so (MoCo, BYOL). A DTensor ignores the assignment: the new value goes to the
wrapper, while the shard behind it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from worldsize.core import ConfigError
from worldsize.strategies.step_hooks import hook_name, wrap_recipe_hooks


def carry_assignments(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Let step hooks assign the data of divided parameters of ``model``; refuse hooks that replace a parameter."""
    places = {
        f"{prefix}.{own}".lstrip("."): (module, own)
        for prefix, module in model.named_modules()
        for own, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    }
    for optimizer in optimizers:
        wrap_recipe_hooks(optimizer, lambda hook: _CarriedHook(hook, places))


_Places = Mapping[str, tuple[nn.Module, str]]


@final
class _CarriedHook:
    """Runs ``hook`` of a recipe; ``places``: the modules of the divided parameters, by the names in the model."""

    def __init__(self, hook: Callable[..., Any], places: _Places) -> None:
        self._hook, self._places = hook, places
        self.__qualname__ = hook_name(hook)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = [module._parameters[own] for module, own in self._places.values()]
        with _Assignments():
            returned = self._hook(*args, **kwargs)
        for (name, (module, own)), parameter in zip(self._places.items(), before, strict=True):
            if module._parameters[own] is not parameter:
                raise ConfigError(
                    f"{self.__qualname__}, a hook of the optimizer, puts a new parameter in the place of {name}, whose "
                    "parts are on several ranks. Change the old one in place, such as parameter.copy_(value) under "
                    "torch.no_grad(), or use strategy=ddp."
                )
        return returned


@final
class _Assignments(TorchFunctionMode):
    """Copies a value that is assigned to the data of a DTensor into its shard."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func != Tensor.data.__set__ or not isinstance(args[0], DTensor):  # type: ignore[attr-defined]
            return func(*args, **(kwargs or {}))
        _assign(*args)
        return None


@torch.no_grad()
def _assign(parameter: DTensor, value: Tensor) -> None:
    if not isinstance(value, DTensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        raise ConfigError(
            f"a hook of the optimizer assigns {list(value.shape)} of {value.dtype} to the data of a parameter "
            f"{list(parameter.shape)} of {parameter.dtype}, whose parts are on several ranks. Make it of parameters "
            "with the same shape and dtype, or use strategy=ddp."
        )
    same = value if value.placements == parameter.placements else value.redistribute(placements=parameter.placements)
    parameter._local_tensor.copy_(same._local_tensor)
