"""AdamW with 8-bit moments, from torchao (Dettmers et al. 2022, arXiv 2110.02861)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from torch.optim import Optimizer

from worldsize.core import Range
from worldsize.errors import require


def adamw_8bit(
    parameters: Iterable[Any],
    lr: Annotated[float, Range(least=0)] = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: Annotated[float, Range(least=0)] = 1e-8,
    weight_decay: Annotated[float, Range(least=0)] = 0.01,
    block_size: Annotated[int, Range(least=1)] = 256,
    compile: bool = True,
) -> Optimizer:
    """Return torchao's AdamW with 8-bit moments, with a state that checkpoints support.

    Args:
        parameters: Parameters or parameter groups, as for torch's optimizers; groups keep their options.
        lr: Learning rate.
        betas: Decay rates of the first and second moments.
        eps: Added to the square root of the second moment.
        weight_decay: Decoupled weight decay.
        block_size: Number of elements that share a scale. Parameters with fewer than 4096 elements, or with a number
            of elements not divisible by it, have 32-bit moments.
        compile: Whether to compile the update. This takes a few seconds per shape and makes the update much faster.

    Raises:
        ConfigError: torchao is not installed.
    """
    require("optimizer=adamw_8bit", "torchao", extra="optimizers")
    from worldsize.optimizers.torchao_adamw import AdamW8bit  # importing torchao takes seconds

    return AdamW8bit(parameters, lr, tuple(betas), eps, weight_decay, block_size=block_size, compile=compile)
