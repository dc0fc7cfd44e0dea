"""AdamW whose moments are kept in 8 bits, by torchao (Dettmers et al. 2022, arXiv 2110.02861)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Annotated, Any

from torch.optim import Optimizer

from worldsize.core import Range
from worldsize.errors import missing_extra


def adamw_8bit(
    parameters: Iterable[Any],
    lr: Annotated[float, Range(least=0)] = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: Annotated[float, Range(least=0)] = 1e-8,
    weight_decay: Annotated[float, Range(least=0)] = 0.01,
    block_size: Annotated[int, Range(least=1)] = 256,
    compile: bool = True,
) -> Optimizer:
    """Return torchao's AdamW with moments of 8 bits, whose state a checkpoint can hold.

    Args:
        parameters: What torch's optimizers take; groups keep their options.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: What is added to the root of the second moment.
        weight_decay: Decoupled weight decay.
        block_size: Numbers that share a scale. Parameters of less than 4096 numbers, or whose number is no multiple of
            it, keep their moments in 32 bits.
        compile: Whether the update is compiled, which takes some seconds for each shape and is much faster then.

    Raises:
        ConfigError: torchao is not installed.
    """
    if find_spec("torchao") is None:
        raise missing_extra("optimizer=adamw_8bit", package="torchao", extra="optimizers")
    from worldsize.optimizers.torchao_adamw import AdamW8bit  # torchao takes seconds

    return AdamW8bit(parameters, lr, tuple(betas), eps, weight_decay, block_size=block_size, compile=compile)
