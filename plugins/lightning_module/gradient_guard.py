"""Reject modules whose hooks change parameter data, or use gradients before they exist."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plugins.lightning_module.untouched import PARAMETER_REMEDY
from worldsize.core import ConfigError

_GRADIENT: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data


@final
class GradientGuard(TorchFunctionMode):
    """Raises ConfigError when the calling thread reads or changes the gradient of a parameter.

    :meth:`check_data` also detects parameter changes through ``data``.

    Args:
        parameters: Ids (``id()``) of the parameters.
    """

    def __init__(self, parameters: Collection[int]) -> None:
        super().__init__()
        self._parameters = parameters
        self._data: list[tuple[Tensor, int]] = []  # data tensors that were read, with their versions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (_GRADIENT.__get__, _GRADIENT.__set__) and id(args[0]) in self._parameters:
            raise ConfigError(
                "training_step and on_train_epoch_end must not read or change parameter gradients, which worldsize "
                "computes in the optimizer's step(). Set clip_norm to clip, call zero_grad() on the optimizer, and use "
                "optimizer.register_step_pre_hook for other changes."
            )
        if func == _DATA.__set__ and id(args[0]) in self._parameters:
            raise ConfigError(f"training_step and on_train_epoch_end must not change a parameter{PARAMETER_REMEDY}")
        result = func(*args, **(kwargs or {}))
        if func == _DATA.__get__ and id(args[0]) in self._parameters:
            self._data.append((result, result._version))
        return result

    def check_data(self) -> None:
        """Raise ConfigError if a parameter changed through ``data``, bypassing its version."""
        data, self._data = self._data, []
        if any(each._version != version for each, version in data):
            raise ConfigError(f"training_step and on_train_epoch_end must not change a parameter{PARAMETER_REMEDY}")
