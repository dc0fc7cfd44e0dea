"""Optimizers that would break what a run promises, refused before a process starts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LRScheduler

from worldsize.errors import ConfigError
from worldsize.optimizers.schedule_free import is_schedule_free

SpecialOptimizer = Literal["adamw_8bit", "schedule_free"]

_REASONS: Mapping[str, str] = {
    "torchao": (
        "keeps its state in tensor classes that a checkpoint, which holds plain tensors alone, cannot save. Use "
        "optimizer=adamw_8bit, whose state is saved."
    ),
    "schedulefree": (
        "changes between the weights that train and those that are evaluated in a way of its own. Use "
        "optimizer=adamw_schedule_free, or AdamWScheduleFree, RAdamScheduleFree or SGDScheduleFree."
    ),
}


def special(optimizer: Optimizer) -> SpecialOptimizer | None:
    """Return the kind of an ``optimizer`` that only strategies train which name it; None: all do."""
    if is_schedule_free(optimizer):
        return "schedule_free"
    return "adamw_8bit" if type(optimizer).__module__ == "worldsize.optimizers.torchao_adamw" else None


def refuse_breaking(optimizer: Optimizer) -> None:
    """Raise ConfigError if ``optimizer`` is of a library whose state cannot be saved and loaded as it should be."""
    library = type(optimizer).__module__.partition(".")[0]
    if library in _REASONS and special(optimizer) is None:
        raise ConfigError(f"{library}: {type(optimizer).__name__} {_REASONS[library]}")


def check_special(optimizer: Optimizer, *, strategy: str, trained: Collection[str]) -> None:
    """Raise ConfigError if a strategy, which has the name ``strategy`` and names ``trained``, cannot train it."""
    kind = special(optimizer)
    if kind is None or kind in trained:
        return
    why = (
        "has a scale for each block of a whole parameter, which parts of it, means and messages do not keep"
        if kind == "adamw_8bit"
        else "is evaluated with other weights than it trains, which processes exchange or hold in ways of their own"
    )
    known = "single, ddp or zero" if kind == "adamw_8bit" else "single, ddp or fsdp"
    raise ConfigError(
        f"{type(optimizer).__name__} {why}: {strategy} does not train it. Set strategy={known}, or optimizer=adamw."
    )


def check_schedule_free(
    optimizer: Optimizer, model: nn.Module, schedule: LRScheduler | None, *, averages: bool
) -> None:
    """Raise ConfigError if a schedule-free ``optimizer`` is combined with what contradicts it.

    Args:
        optimizer: Any optimizer; only schedule-free ones are checked.
        model: Its model.
        schedule: Its schedule.
        averages: Whether the run averages weights (``ema.decay``).
    """
    if not is_schedule_free(optimizer):
        return
    name = type(optimizer).__name__
    if schedule is not None and not isinstance(schedule, ConstantLR):
        raise ConfigError(
            f"{name} does without a schedule of the learning rate. Set schedule=constant; optimizer.warmup_steps "
            "lets the rate rise."
        )
    if averages:
        raise ConfigError(f"{name} averages weights itself. Leave ema.decay out.")
    for where, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            raise ConfigError(
                f"{name}: the running statistics of {where} ({type(module).__name__}) are those of the weights that "
                "train, and others are evaluated. Use another norm, such as GroupNorm, or optimizer=adamw."
            )
