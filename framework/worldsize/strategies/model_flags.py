"""Saves and restores which parts of a model are in training mode and which are frozen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import nn


@final
class ModelModes:
    """A snapshot of the training mode of each module of ``models``, in the order of ``modules()``: parents first."""

    def __init__(self, *models: nn.Module) -> None:
        self._modes = [(module, module.training) for model in models for module in model.modules()]

    def restore(self) -> None:
        """Restore the mode of each module, whatever the modes of its parents and children.

        ``train`` is called where modes differ, since a program may have overridden it, such as to merge adapters. It
        also sets the modes of children, some of them shared with other modules, so that all are set once more.
        """
        for module, mode in self._modes:
            if module.training != mode:
                module.train(mode)
        for module, mode in self._modes:
            if module.training != mode:
                module.training = mode


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Put ``models`` in evaluation mode within the block; afterwards their modules have their own modes again.

    Buffers have the values from before: each process evaluates other batches.
    """
    modes = ModelModes(*models)
    owners = [module._buffers for model in models for module in model.modules()]
    kept = [
        (owner, name, each, each._version, each.clone())
        for owner in owners
        for name, each in owner.items()
        if each is not None
    ]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        modes.restore()
        with torch.no_grad():
            for owner, name, buffer, version, before in kept:
                owner[name] = buffer if buffer._version == version else buffer.copy_(before)


@final
class ModelFlags:
    """A snapshot of the training modes of all modules of ``model``, and of which parameters require gradients."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modes = ModelModes(model)
        self._trained = [(parameter, parameter.requires_grad) for parameter in model.parameters()]

    def restore(self) -> None:
        """Restore the flags of the snapshot where they differ."""
        self._modes.restore()
        for parameter, requires_grad in self._trained:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
