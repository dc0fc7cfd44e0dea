"""A GPT that cannot be initialized shard by shard, for comparison with one that can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import nn

from recipes.stdlib_lm.recipe import StdlibLM


@final
@dataclass(frozen=True)
class WholeLM(StdlibLM):
    """``stdlib_lm`` with a hook on each parameter, which forces every process to build the whole model."""

    def model(self) -> nn.Module:
        model = super().model()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
        return model
