"""The tensors that independent workers synchronize: parameters, and buffers that can be averaged."""

from __future__ import annotations

from torch import Tensor, nn


def trained_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters that an optimizer may change, in their shapes."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def frozen_parameters(model: nn.Module) -> list[Tensor]:
    """Return the parameters, in their shapes, that no optimizer changes; a recipe may, such as averaged copies."""
    return [parameter for parameter in model.parameters() if not parameter.requires_grad]


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """Return the buffers, in their shapes, that are saved and can be averaged, such as BatchNorm's statistics."""
    kept = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in kept and buffer.is_floating_point()]
