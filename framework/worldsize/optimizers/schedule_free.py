"""Schedule-free optimizers train weights between those that they step and those that are evaluated.

Source: Defazio et al. 2024, arXiv 2405.15682, and its package ``schedulefree``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Annotated, Any

import torch
from torch import nn
from torch.optim import Optimizer

from worldsize.core import Range
from worldsize.errors import missing_extra

_KINDS = ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")  # others switch in ways of their own


def adamw_schedule_free(
    parameters: Iterable[Any],
    lr: Annotated[float, Range(least=0)] = 2.5e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: Annotated[float, Range(least=0)] = 1e-8,
    weight_decay: Annotated[float, Range(least=0)] = 0.0,
    warmup_steps: Annotated[int, Range(least=0)] = 0,
) -> Optimizer:
    """Return ``AdamWScheduleFree`` of the package ``schedulefree``, ready to train.

    Args:
        parameters: What torch's optimizers take; groups keep their options.
        lr: Learning rate, which no schedule changes.
        betas: Share of the average in the weights that train, and decay of the second moment.
        eps: What is added to the root of the second moment.
        weight_decay: Weight decay of the weights that train.
        warmup_steps: Steps in which the rate rises linearly.

    Raises:
        ConfigError: the package is not installed.
    """
    if find_spec("schedulefree") is None:
        raise missing_extra("optimizer=adamw_schedule_free", package="schedulefree", extra="optimizers")
    from schedulefree import AdamWScheduleFree

    options: dict[str, Any] = {"eps": eps, "weight_decay": weight_decay, "warmup_steps": warmup_steps}
    optimizer: Optimizer = AdamWScheduleFree(parameters, lr, tuple(betas), **options)
    begin_training(optimizer)
    return optimizer


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` is one whose weights :func:`evaluated_weights` can exchange."""
    kind = type(optimizer)
    return kind.__module__.partition(".")[0] == "schedulefree" and kind.__name__ in _KINDS


def begin_training(optimizer: Optimizer) -> None:
    """Put a schedule-free optimizer that has not stepped into its training mode; leave any other as it is."""
    if is_schedule_free(optimizer):
        for group in optimizer.param_groups:
            group["train_mode"] = True  # its train() would also make an empty state of each parameter


def has_begun(optimizer: Optimizer) -> bool:
    """Return whether a schedule-free optimizer has stepped: before that, its state is a copy of weights."""
    return any(group["k"] for group in optimizer.param_groups)


@contextmanager
def evaluated_weights(optimizers: Iterable[Optimizer], model: nn.Module) -> Iterator[None]:
    """Let ``model`` hold the weights within the block with which its schedule-free ``optimizers`` are to be evaluated.

    Afterwards the weights have the very bits that they had, which the optimizer's own way back would round.
    """
    if not (free := [each for each in optimizers if is_schedule_free(each) and has_begun(each)]):
        yield
        return
    model.state_dict()  # shards again what FSDP has gathered
    weights = [weight for each in free for group in each.param_groups for weight in group["params"]]
    kept = [weight.detach().clone() for weight in weights]
    try:
        for optimizer in free:
            optimizer.eval()  # type: ignore[attr-defined]
        yield
    finally:  # a gang that heals goes on with them after a failure
        for optimizer in free:
            begin_training(optimizer)
        model.state_dict()
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)
