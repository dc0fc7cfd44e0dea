"""The tensors that workers which train apart agree on: parameters, and buffers that can be averaged."""

from __future__ import annotations

from torch import Tensor, nn


def trained_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters that an optimizer may change."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def frozen_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters that no optimizer changes; a recipe may do so itself, as with averaged copies."""
    return [parameter for parameter in model.parameters() if not parameter.requires_grad]


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers that are saved with the model and can be averaged, such as BatchNorm's."""
    kept = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in kept and buffer.is_floating_point()]
