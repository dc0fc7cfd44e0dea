"""A GPT that cannot be described first and made tensor by tensor, to compare with one that can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import nn

from recipes.stdlib_lm.recipe import StdlibLM


@final
@dataclass(frozen=True)
class WholeLM(StdlibLM):
    """The recipe ``stdlib_lm`` with a hook on each parameter, which makes every process build the model whole."""

    def model(self) -> nn.Module:
        model = super().model()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
        return model
