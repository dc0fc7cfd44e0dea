"""Builds what a recipe describes on the meta device, so that what no process could build is refused before a run."""

from __future__ import annotations

import logging
import re

import torch

from worldsize.config.instantiate import described_failure
from worldsize.core import ConfigError, MultiUpdateRecipe, Recipe, Strategy
from worldsize.reproducibility.seeds import generators_kept
from worldsize.strategies.alone import train_state_of
from worldsize.strategies.sparse_steps import check_sparse_steps

_logger = logging.getLogger(__name__)

# what depends on the host: files, packages and memory may be there where the processes run
_OF_THIS_HOST = (OSError, ImportError, MemoryError, NotImplementedError)
_OF_A_DEVICE = re.compile(r"\b(meta|cuda|device|gpu|memory)\b", re.IGNORECASE)


def check_trainable(recipe: Recipe, strategy: Strategy) -> None:
    """Ask ``strategy`` whether it trains recipes like this one.

    Raises:
        ConfigError: it takes one update a step and the recipe several, or the recipe does not say what it asks.
    """
    if isinstance(recipe, MultiUpdateRecipe) and not strategy.trains_multi_update:
        raise ConfigError(
            f"{type(recipe).__name__} takes several updates a step, and {type(strategy).__name__} takes one: "
            "it sums and clips all gradients together, at the end of a step. Set strategy=ddp, zero, fsdp or single."
        )
    strategy.check_recipe(recipe)


def check_construction(recipe: Recipe, strategy: Strategy) -> None:
    """Build the model, its optimizers and their schedules on the meta device, where tensors take no memory.

    ``strategy`` says then whether it can carry them.

    What fails there is built once more on the CPU, as every process builds it. Only what fails in the same way on both
    is refused; a failure that may be due to this host or to the kind of device is left to the processes.

    Raises:
        ConfigError: the recipe's arguments, or the optimizer's or the schedule's, cannot be used, or not under
            ``strategy``.
    """
    failed = _failure(recipe, strategy, "meta")
    if failed is None or not _is_certain(failed):
        return
    again = _failure(recipe, strategy, "cpu")
    if again is None or (type(again), str(again)) != (type(failed), str(failed)):
        _logger.debug("the recipe can be built on the CPU alone: %s", failed)
        return
    if isinstance(again, ConfigError):
        raise again
    raise ConfigError(
        f"{type(recipe).__name__} cannot be built: {described_failure(again)}. "
        "Change the options below recipe, optimizer or schedule; nothing was started."
    ) from again


def _failure(recipe: Recipe, strategy: Strategy, device: str) -> Exception | None:
    try:
        with generators_kept(), torch.device(device):  # the processes that train are forked from this one
            model = recipe.model()
            for optimizer in train_state_of(recipe, model).optimizers:
                strategy.check_built(recipe, model, optimizer)
                if not strategy.serves_rows:
                    check_sparse_steps(model, optimizer)
    except Exception as error:  # any: a recipe is anyone's code
        return error
    return None


def _is_certain(error: Exception) -> bool:
    return not isinstance(error, _OF_THIS_HOST) and _OF_A_DEVICE.search(str(error)) is None
