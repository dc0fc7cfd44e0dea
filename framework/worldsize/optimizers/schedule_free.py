"""Schedule-free optimizers, and checks for optimizers that need special support.

Schedule-free optimizers step one set of weights, evaluate its running average, and train an interpolation of both.
Source: Defazio et al. 2024, arXiv 2405.15682, and the package ``schedulefree``. Only strategies that declare support
can use schedule-free optimizers and 8-bit AdamW. These checks run before any process starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from worldsize.core import Range
from worldsize.errors import ConfigError, require

_KINDS = ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")  # others switch modes differently


def adamw_schedule_free(
    parameters: Iterable[Any],
    lr: Annotated[float, Range(least=0)] = 2.5e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: Annotated[float, Range(least=0)] = 1e-8,
    weight_decay: Annotated[float, Range(least=0)] = 0.0,
    warmup_steps: Annotated[int, Range(least=0)] = 0,
) -> Optimizer:
    """Return ``AdamWScheduleFree`` from the package ``schedulefree``, in training mode.

    Args:
        parameters: Parameters or parameter groups, as for torch's optimizers; groups keep their options.
        lr: Learning rate, unaffected by schedules.
        betas: Interpolation weight of the average in the training weights, and decay rate of the second moment.
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay, applied at the training weights.
        warmup_steps: Number of linear warmup steps.

    Raises:
        ConfigError: the package is not installed.
    """
    require("optimizer=adamw_schedule_free", "schedulefree", extra="optimizers")
    from schedulefree import AdamWScheduleFree

    options: dict[str, Any] = {"eps": eps, "weight_decay": weight_decay, "warmup_steps": warmup_steps}
    optimizer: Optimizer = AdamWScheduleFree(parameters, lr, tuple(betas), **options)
    begin_training(optimizer)
    return optimizer


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` is a supported schedule-free one."""
    kind = type(optimizer)
    return kind.__module__.partition(".")[0] == "schedulefree" and kind.__name__ in _KINDS


def begin_training(optimizer: Optimizer) -> None:
    """Set a schedule-free optimizer to training mode, without changing weights."""
    if is_schedule_free(optimizer):
        for group in optimizer.param_groups:
            group["train_mode"] = True  # its train() would also create an empty state per parameter


def has_begun(optimizer: Optimizer) -> bool:
    """Return whether a schedule-free optimizer has stepped.

    Before the first step, evaluation and training weights are equal.
    """
    return any(group["k"] for group in optimizer.param_groups)


@contextmanager
def use_evaluation_weights(optimizers: Iterable[Optimizer], model: nn.Module) -> Iterator[None]:
    """Switch ``model`` to evaluation weights of schedule-free ``optimizers`` within the block.

    The training weights are restored bit by bit from a copy; the optimizer's own train() would round them.
    """
    if not (free := [each for each in optimizers if is_schedule_free(each) and has_begun(each)]):
        yield
        return
    model.state_dict()  # reshards parameters gathered by FSDP
    weights = [weight for each in free for group in each.param_groups for weight in group["params"]]
    kept = [weight.detach().clone() for weight in weights]
    try:
        for optimizer in free:
            optimizer.eval()  # type: ignore[attr-defined]
        yield
    finally:  # training may continue after a failure
        for optimizer in free:
            begin_training(optimizer)
        model.state_dict()
        with torch.no_grad():
            for weight, before in zip(weights, kept, strict=True):
                weight.copy_(before)


SpecialOptimizer = Literal["adamw_8bit", "schedule_free"]

_REASONS: Mapping[str, str] = {
    "torchao": "keeps its state in tensor subclasses, which checkpoints do not support. Use optimizer=adamw_8bit.",
    "schedulefree": (
        "is not supported, because it switches between training and evaluation weights in a different way. Use "
        "optimizer=adamw_schedule_free, or AdamWScheduleFree, RAdamScheduleFree or SGDScheduleFree."
    ),
}


def get_special_kind(optimizer: Optimizer) -> SpecialOptimizer | None:
    """Return the kind of ``optimizer`` if strategies must declare support for it, else None."""
    if is_schedule_free(optimizer):
        return "schedule_free"
    return "adamw_8bit" if type(optimizer).__module__ == "worldsize.optimizers.torchao_adamw" else None


def refuse_breaking(optimizer: Optimizer) -> None:
    """Raise ConfigError for an unsupported optimizer from torchao or schedulefree."""
    library = type(optimizer).__module__.partition(".")[0]
    if library in _REASONS and get_special_kind(optimizer) is None:
        raise ConfigError(f"{library}: {type(optimizer).__name__} {_REASONS[library]}")


def check_special(optimizer: Optimizer, *, strategy: str, trained: Collection[str]) -> None:
    """Raise ConfigError if ``optimizer`` needs special support that ``strategy`` lacks.

    ``trained``: the kinds of special optimizers that the strategy supports.
    """
    kind = get_special_kind(optimizer)
    if kind is None or kind in trained:
        return
    why = (
        "its per-block quantization scales are lost when parameters are sharded, averaged or sent"
        if kind == "adamw_8bit"
        else "its evaluation weights differ from the training weights, which the strategy exchanges or shards"
    )
    known = "single, ddp or zero" if kind == "adamw_8bit" else "single, ddp or fsdp"
    raise ConfigError(
        f"{type(optimizer).__name__} is not supported with {strategy}: {why}. Set strategy={known}, or optimizer=adamw."
    )


def check_schedule_free(
    optimizer: Optimizer, model: nn.Module, schedule: LRScheduler | None, *, averages: bool
) -> None:
    """Raise ConfigError if a schedule-free ``optimizer`` is used with incompatible settings.

    Args:
        optimizer: Any optimizer; only schedule-free ones are checked.
        model: The model that it trains.
        schedule: The learning-rate schedule, if any.
        averages: Whether the run averages weights (``ema.decay``).
    """
    if not is_schedule_free(optimizer):
        return
    name = type(optimizer).__name__
    if schedule is not None and not isinstance(schedule, ConstantLR):
        raise ConfigError(
            f"{name} does not support a learning-rate schedule. Set schedule=constant, and optimizer.warmup_steps for "
            "a warmup."
        )
    if averages:
        raise ConfigError(f"{name} already averages weights. Remove ema.decay.")
    for where, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            raise ConfigError(
                f"{name} does not support the running statistics of {where} ({type(module).__name__}), which belong to "
                "the training weights, not the evaluation weights. Use a different norm, such as GroupNorm, or "
                "optimizer=adamw."
            )
