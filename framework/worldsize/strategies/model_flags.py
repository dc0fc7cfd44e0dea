"""Remembers which parts of a model train and which are frozen, as a recipe has set it at one moment."""

from __future__ import annotations

from typing import final

from torch import nn


@final
class ModelFlags:
    """Holds the modes of all modules of ``model``, and which parameters require gradients, as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modes = [(module, module.training) for module in model.modules()]  # parents first
        self._trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore(self) -> None:
        """Set the flags again as they were then, where they differ."""
        for module, mode in self._modes:
            if module.training != mode:
                module.train(mode)
        for parameter, requires_grad in self._trained:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
