"""Computes linear layers in 8-bit floating point, by torchao."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, final

import torch
from torch import Tensor, nn

from worldsize.core import ConfigError, Recipe
from worldsize.errors import missing_extra

_MULTIPLE = 16  # of both sizes of a weight, as tensor cores need it
_LEAST_CAPABILITY = (8, 9)  # of a GPU that multiplies 8-bit numbers


def use_fp8(recipe: Recipe, model: nn.Module, device: torch.device) -> None:
    """Let linear layers of ``model`` multiply in 8 bits, scaled by the largest number of each tensor.

    These are the layers in the blocks of ``recipe`` (of the whole model without blocks) whose sizes are multiples of
    16. Parameters stay as they are, in float32. Devices without such products round to 8 bits and multiply as before.
    """
    emulates = device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY
    make = _maker(emulates=emulates)
    for layer in fp8_layers(recipe, model):
        layer.forward = _Product(layer, make)  # type: ignore[assignment, method-assign]  # no wrapper: it has a name


def check_fp8(recipe: Recipe, model: nn.Module) -> None:
    """Raise ConfigError if torchao is not installed, or nothing in ``model`` would compute in 8 bits."""
    if find_spec("torchao") is None:
        raise missing_extra("precision=fp8", package="torchao", extra="fp8")
    if not fp8_layers(recipe, model):
        raise ConfigError(
            f"precision=fp8: {type(recipe).__name__} has no linear layer with both sizes a multiple of {_MULTIPLE} "
            "in its blocks. Change the sizes, or set precision=bf16."
        )


def fp8_layers(recipe: Recipe, model: nn.Module) -> Sequence[nn.Linear]:
    """Return the layers of ``model`` that compute in 8 bits with ``precision=fp8``."""
    modules = [each for part in list(recipe.blocks(model)) or [model] for each in part.modules()]
    return [each for each in modules if isinstance(each, nn.Linear) and _fits(each)]


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def _maker(*, emulates: bool) -> Callable[[nn.Linear], nn.Module]:
    """Return a function that makes a layer's 8-bit counterpart; torchao takes seconds to import."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=emulates)

    def make(layer: nn.Linear) -> nn.Module:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        converted: nn.Module = convert_to_float8_training(plain, config=config)
        return converted

    return make


@final
class _Product:
    """Replaces the forward pass of ``layer``, whose parameters it uses wherever a strategy puts them."""

    def __init__(self, layer: nn.Linear, make: Callable[[nn.Linear], nn.Module]) -> None:
        self._layer = make(layer)
        self._layer._parameters = layer._parameters

    def __call__(self, inputs: Tensor) -> Tensor:
        if torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
        output: Any = self._layer(inputs)
        return output  # type: ignore[no-any-return]
