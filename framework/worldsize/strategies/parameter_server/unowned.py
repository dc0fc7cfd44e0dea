"""Detects changes of weights that no server owns, which would not reach other workers."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from worldsize.core import ConfigError, RunContext
from worldsize.strategies.loss_watch import LossWatch


def served_watch(model: nn.Module, context: RunContext) -> LossWatch:
    """Watch the losses of a worker, whose changes of weights the next pull would replace; workers form no group."""
    return LossWatch(model, processes=2, logical_ranks=context.logical_ranks, ordered=False, has_group=False)


@final
class UnownedWeights:
    """Watches the frozen parameters and saved buffers of ``model``, such as averaged copies, for changes.

    A check compares two numbers per tensor, since torch counts the changes of each tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = {
            name: (module, own)
            for prefix, module in model.named_modules()
            for own, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None and tensor.numel() and own not in module._non_persistent_buffers_set
            if not tensor.requires_grad
            for name in [f"{prefix}.{own}".lstrip(".")]
        }
        self._before = self._versions()

    def check(self) -> None:
        """Raise ConfigError if one of these tensors has changed since this object was made."""
        for name, version in self._versions().items():
            if version != self._before[name]:
                raise ConfigError(
                    f"training has changed {name}, which is not trained: with a parameter server it reaches neither "
                    "evaluation nor checkpoints. Use strategy=ddp, or register it with persistent=False if it is a "
                    "cache."
                )

    def _versions(self) -> dict[str, tuple[int, int]]:
        tensors: dict[str, Tensor | None] = {name: getattr(module, own) for name, (module, own) in self._held.items()}
        return {name: (id(tensor), -1 if tensor is None else tensor._version) for name, tensor in tensors.items()}
