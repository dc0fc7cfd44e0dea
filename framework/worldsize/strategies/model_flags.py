"""Saves and restores which parts of a model are in training mode and which are frozen."""

from __future__ import annotations

from typing import final

from torch import nn


@final
class ModelFlags:
    """A snapshot of the training modes of all modules of ``model``, and of which parameters require gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modes = [(module, module.training) for module in model.modules()]  # parents first
        self._trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore(self) -> None:
        """Restore the flags of the snapshot where they differ."""
        for module, mode in self._modes:
            if module.training != mode:
                module.train(mode)
        for parameter, requires_grad in self._trained:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
