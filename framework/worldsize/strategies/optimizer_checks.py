"""Refuses optimizers that a strategy or a checkpoint cannot carry, by their class or after a trial."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import LRScheduler

from worldsize.checkpoint.tree import split
from worldsize.core import ConfigError, Recipe, Reduction
from worldsize.errors import CheckpointError
from worldsize.optimizers.refused import special
from worldsize.strategies.extra_state_trial import divides_extra_state, has_extra_state
from worldsize.strategies.optimizer_trial import Trial
from worldsize.strategies.train_state import extra_state

_logger = logging.getLogger(__name__)

# torch's own that update each number by itself; none that is derived from them
ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)

_LACKS = "its state_dict() lacks a part of its state, such as a counter:"
_KEEP = "Keep it in the optimizer's state or param_groups."


def updates_apart(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to update each parameter by itself, and to keep tensors and numbers."""
    return type(optimizer) in ELEMENTWISE or special(optimizer) == "adamw_8bit"


def updates_elements(recipe: Recipe, model: nn.Module, optimizer: Optimizer, *, dims: Sequence[int] = (0,)) -> bool:
    """Return whether parts of each parameter can be updated by themselves, if it is cut along one of ``dims``.

    Args:
        recipe: Makes the optimizers.
        model: Its model, whose tensors may be on the meta device.
        optimizer: One of them, made before; torch's own ones are not tried.
        dims: Dimensions along which ranks have parts.
    """
    return type(optimizer) in ELEMENTWISE or _updates_parts(Trial(recipe, model), dims)


def _updates_parts(trial: Trial, dims: Sequence[int]) -> bool:
    return trial.failure is None and all(trial.updates_parts(dim) for dim in dims)


def refuse_divided_updates(
    recipe: Recipe,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    reduce: Reduction,
    heals: bool,
    dims: Sequence[int] = (0,),
) -> None:
    """Refuse an optimizer whose updates depend on where ranks cut parameters, if the cuts can move.

    With ``reduce="ordered"`` bits must not depend on them, and a gang that ``heals`` moves them during training.

    Raises:
        ConfigError: parts of a parameter are updated differently than the whole.
    """
    if (reduce != "ordered" and not heals) or type(optimizer) in ELEMENTWISE:
        return
    trial = Trial(recipe, model)
    if _updates_parts(trial, dims):
        return
    failure = trial.failure
    finding = (
        f"could not be tried on small tensors ({failure})"
        if failure
        else "updates a parameter differently than its parts, as optimizers do that take norms"
    )
    raise ConfigError(
        f"{type(optimizer).__name__} {finding}, and this strategy divides parameters at places that depend on the "
        "number of processes. Use strategy=ddp or zero, or an optimizer that updates each number by itself, such as "
        "optimizer=adamw"
        f"{', or reproducibility=seeded' if reduce == 'ordered' and not heals else ''}."
    )


def refuse_joint_updates(recipe: Recipe, model: nn.Module, optimizer: Optimizer, *, because: str) -> None:
    """Refuse an optimizer whose update of a parameter depends on other parameters.

    Raises:
        ConfigError: it does, for example since it takes a norm of all; the message has the reason ``because``.
    """
    if updates_apart(optimizer):
        return
    trial = Trial(recipe, model)
    if trial.failure is None and (reason := trial.joint):
        raise ConfigError(
            f"{type(optimizer).__name__} {reason}, and {because}. Use strategy=ddp, or an optimizer that updates each "
            "parameter by itself, such as optimizer=adamw."
        )


def refuse_divided_state(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose ``state_dict()`` has entries that would differ between ranks with other parameters.

    Raises:
        ConfigError: it has one, besides its state and groups.
    """
    if updates_apart(optimizer):
        return
    trial = Trial(recipe, model)
    if extra_state(optimizer) if trial.failure else divides_extra_state(trial):
        raise ConfigError(_unshared(optimizer, "with this strategy each rank updates a part of the parameters"))


def refuse_extra_state(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose ``state_dict()`` has entries besides its state and groups: servers save none.

    Raises:
        ConfigError: it has one.
    """
    if updates_apart(optimizer):
        return
    trial = Trial(recipe, model)
    if extra_state(optimizer) if trial.failure else has_extra_state(trial):
        raise ConfigError(_unshared(optimizer, "servers have an optimizer for each part of the parameters"))


def _unshared(optimizer: Optimizer, because: str) -> str:
    return (
        f"{type(optimizer).__name__} keeps values in its state_dict() besides state and param_groups, and {because}. "
        "Keep them in the optimizer's state or param_groups, or use strategy=ddp."
    )


def refuse_unsaved(recipe: Recipe, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None) -> None:
    """Refuse an optimizer and a schedule with values, as they are made or after some steps, that no checkpoint holds.

    Raises:
        ConfigError: there is one.
    """
    options = [{**group, "params": []} for group in optimizer.param_groups]
    made = {"optimizer": {"param_groups": options}, "schedule": schedule.state_dict() if schedule else {}}
    try:
        split(made)
        is_torchs = schedule is None or type(schedule).__module__ == "torch.optim.lr_scheduler"
        if is_torchs and updates_apart(optimizer):
            return
        trial = Trial(recipe, model)
        if trial.failure is not None:
            return
        for state in trial.states:
            split(state)
    except CheckpointError as error:
        kinds = [type(optimizer).__name__, *([type(schedule).__name__] if schedule else [])]
        raise ConfigError(f"{' and '.join(kinds)}: {error}") from error
    if not trial.resumes:
        _logger.warning(
            "%s: %s a run that is resumed or restarted trains differently. %s", type(optimizer).__name__, _LACKS, _KEEP
        )


def refuse_unsent(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state a process that joins a gang would not have.

    Raises:
        ConfigError: its ``state_dict`` lacks a part.
    """
    if updates_apart(optimizer):
        return
    trial = Trial(recipe, model)
    if trial.failure is None and not trial.resumes:
        raise ConfigError(
            f"{type(optimizer).__name__}: {_LACKS} a process that takes another's place does not get it. {_KEEP} "
            "Or set strategy.on_failure=restart."
        )
