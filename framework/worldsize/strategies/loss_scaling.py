"""Steps optimizers under a loss scale, and counts the updates that an overflow leaves out."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from worldsize.optimizers.names import all_parameters

_logger = logging.getLogger(__name__)
_told: list[bool] = []  # whether this process has logged an overflow


@final
class LossScaler(torch.amp.GradScaler):
    """Unscales the gradients of divided parameters apart from others, since no kernel takes both."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Return by device whether a gradient there is not finite: 0 or 1, scalars."""
        parameters, infinite = all_parameters(optimizer), dict[torch.device, Tensor]()
        for is_divided in (True, False):
            part: Any = SimpleNamespace(
                param_groups=[{"params": [each for each in parameters if isinstance(each, DTensor) == is_divided]}]
            )
            for device, own in super()._unscale_grads_(part, inv_scale, found_inf, allow_fp16).items():
                infinite[device] = torch.maximum(infinite[device], own) if device in infinite else own
        return infinite


def step_scaled(scaler: torch.amp.GradScaler, optimizer: Optimizer, *, speaks: bool) -> bool:
    """Step ``optimizer`` unless its gradient overflows in float16; return whether it was stepped.

    Optimizers with ``fused=True`` decide that on the device. On a GPU they count as stepped, since reading the decision
    would wait for the device.

    Args:
        scaler: Holds the loss scale, and makes the decision.
        optimizer: Has gradients that are multiplied by the scale.
        speaks: Whether to log the first overflow.
    """
    if not scaler.is_enabled():
        scaler.step(optimizer)
        return True
    stepped: list[bool] = []
    handle = optimizer.register_step_pre_hook(lambda *_: stepped.append(not _leaves_out(optimizer)))
    try:
        scaler.step(optimizer)
    finally:
        handle.remove()
    if not any(stepped) and speaks and not _told:
        _told.append(True)
        _logger.warning(
            "precision=fp16: a gradient left the range of float16, so that this update is left out and the loss scale "
            "is divided by %g. Some such steps are usual, above all at the beginning; `skipped` in metrics.jsonl "
            "counts them, and events.jsonl has their steps. precision=bf16 has none.",
            1 / scaler.get_backoff_factor(),
        )
    return any(stepped)


def _leaves_out(optimizer: Optimizer) -> bool:
    """Return whether an optimizer whose ``step`` is called will leave its update out itself, where that is known."""
    overflow: Tensor | None = getattr(optimizer, "found_inf", None)  # set by the scaler if the optimizer is fused
    return overflow is not None and overflow.device.type == "cpu" and bool(overflow)
