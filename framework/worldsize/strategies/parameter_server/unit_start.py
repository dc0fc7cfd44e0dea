"""Saves the parts of a worker's model that no server has, at the start of a unit."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from worldsize.strategies.model_flags import ModelFlags


@final
class UnitStart:
    """A copy of flags and unsaved buffers of ``model``, which an abandoned unit may leave half changed."""

    def __init__(self, model: nn.Module) -> None:
        self._flags = ModelFlags(model)
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in model.modules()
            for name in sorted(module._non_persistent_buffers_set)
            if (buffer := module._buffers[name]) is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the saved flags and buffers of the model."""
        self._flags.restore()
        for module, name, buffer, values in self._buffers:
            module._buffers[name] = buffer.copy_(values)
