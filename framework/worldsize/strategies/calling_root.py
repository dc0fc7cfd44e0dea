"""The module around a model inside whose forward pass a whole loss is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn

_Action = Callable[[], Any]


@final
class CallingRoot(nn.Module):
    """Holds a model, and calls any function inside the hooks of its own forward pass.

    It is needed because a recipe may call parts of its model directly, in any order. The model's tensors keep their
    names, since checkpoints are made of the model itself.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._call: Callable[[_Action], Any] | None = None

    def guard(self, call: Callable[[_Action], Any]) -> None:
        """Let ``call`` call the functions that are given to this module."""
        self._call = call

    def forward(self, action: _Action) -> Any:
        """Call ``action``, which computes with the model or parts of it."""
        return action() if self._call is None else self._call(action)
