"""Refuses what a training step would do with gradients that are not there yet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode

from worldsize.core import ConfigError

_GRADIENT: Any = torch.Tensor.grad


@final
class GradientGuard(TorchFunctionMode):
    """Raises ConfigError where the calling thread reads or changes the gradient of a parameter, or makes it itself.

    Args:
        parameters: Identities of the parameters.
    """

    def __init__(self, parameters: Collection[int]) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in (_GRADIENT.__get__, _GRADIENT.__set__) and id(args[0]) in self._parameters:
            raise ConfigError(
                "training_step reads or changes the gradient of a parameter, which worldsize computes at the step of "
                "its optimizer. Set clip_norm to clip, call zero_grad() of the optimizer itself, and leave the rest to "
                "a hook of the optimizer: register_step_pre_hook."
            )
        if func is torch.Tensor.backward:
            raise ConfigError("training_step calls loss.backward(). Call self.manual_backward(loss) instead.")
        return func(*args, **(kwargs or {}))
