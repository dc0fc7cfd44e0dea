"""Builds a recipe's objects on the meta device, to refuse recipes that cannot be built before a run starts."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import Module
from torch.optim import Optimizer

from worldsize.config.instantiate import described_failure
from worldsize.core import Cluster, ConfigError, FeatureRecipe, MultiUpdateRecipe, Numerics, Recipe, Strategy
from worldsize.optimizers.schedule_free import check_schedule_free, check_special, refuse_breaking
from worldsize.record.determinism import generators_kept
from worldsize.strategies.declared_buffers import declare_buffers
from worldsize.strategies.gradient_reducer import refuse_norms_of_others
from worldsize.strategies.model_passes import check_passes
from worldsize.strategies.multi_train_state import MultiTrainState
from worldsize.strategies.optimizer_checks import (
    check_sparse_steps,
    refuse_closures,
    refuse_sparse_sums,
    refuse_unsaved,
)
from worldsize.strategies.schedules import Schedule, check_metric
from worldsize.strategies.synchronous import train_state_of
from worldsize.strategies.train_state import TrainState

_logger = logging.getLogger(__name__)

_OVERFLOW = re.compile(r"Storage size calculation overflowed|multiplication overflow")  # torch's, of a size in bytes
_ADDRESSABLE = 1 << 47  # bytes that a process can address on x86-64

# errors that depend on the host: files, packages and memory may exist where the processes run
_OF_THIS_HOST = (OSError, ImportError, MemoryError, NotImplementedError)
_OF_A_DEVICE = re.compile(r"\b(meta|cuda|device|gpu|memory)\b", re.IGNORECASE)


class _TooLargeError(ConfigError):
    """A model that no process can hold, which need not be tried on the CPU."""


def check_trainable(recipe: Recipe, strategy: Strategy) -> None:
    """Raise ConfigError if ``strategy`` cannot train recipes like this one.

    Raises:
        ConfigError: it takes one update per step and the recipe several, or it needs information that the recipe lacks.
    """
    if isinstance(recipe, MultiUpdateRecipe) and "multi_update" not in strategy.supports:
        raise ConfigError(
            f"{type(recipe).__name__} takes several updates a step, and {type(strategy).__name__} takes one: "
            "it sums and clips all gradients together, at the end of a step. Set strategy=ddp, zero, fsdp or single."
        )
    if isinstance(recipe, FeatureRecipe) and "features" not in strategy.supports:
        raise ConfigError(
            f"the loss of {type(recipe).__name__} needs the features of all logical ranks, which "
            f"{type(strategy).__name__} does not gather. Set strategy=ddp, zero, fsdp, mesh or single."
        )
    strategy.check_recipe(recipe)


def check_construction(
    recipe: Recipe,
    strategy: Strategy,
    numerics: Numerics | None = None,
    cluster: Cluster | None = None,
    *,
    averages: bool = False,
    schedule_metric: str | None = None,
) -> None:
    """Build the model, its optimizers and their schedules on the meta device, where tensors take no memory.

    Then check that ``strategy`` supports them, and that ``numerics`` suit the model (None: the default ones do),
    and that processes of ``cluster`` can sum its gradients (None: they can).
    ``averages``: whether the run averages weights. ``schedule_metric``: the metric that advances its schedule.

    A failure is repeated on the CPU, where every process builds the model. Only the same failure on both is an error
    here; one that may be due to this host or the device is left to the processes.

    Raises:
        ConfigError: the arguments of the recipe, the optimizer or the schedule are invalid, or do not work with
            ``strategy``.
    """
    numerics = numerics or Numerics()
    failure = partial(_failure, recipe, strategy, numerics, cluster, averages, schedule_metric)
    failed = failure("meta")
    if failed is None or not _is_certain(failed):
        return
    is_too_large = isinstance(failed, _TooLargeError) or _OVERFLOW.search(str(failed))
    again = failed if is_too_large else failure("cpu")
    if again is None or (type(again), str(again)) != (type(failed), str(failed)):
        _logger.debug("the recipe can be built on the CPU alone: %s", failed)
        return
    if isinstance(again, ConfigError):
        raise again
    raise ConfigError(
        f"{type(recipe).__name__} cannot be built: {described_failure(again)}. "
        "Change the options below recipe, optimizer or schedule; nothing was started."
    ) from again


def _failure(
    recipe: Recipe,
    strategy: Strategy,
    numerics: Numerics,
    cluster: Cluster | None,
    averages: bool,
    metric: str | None,
    device: str,
) -> Exception | None:
    try:
        with generators_kept(), torch.device(device):  # the training processes are forked from this one
            model = recipe.model()
            _check_size(model)
            declare_buffers(recipe, model)
            if isinstance(recipe, FeatureRecipe) and numerics.policy.scales_loss:
                raise ConfigError(
                    f"precision={numerics.precision}: derivatives by features are computed without a loss scale, and "
                    f"may be less than {numerics.policy.autocast} can hold. Set precision=bf16."
                )
            if cluster is not None and "sparse_gradients" in strategy.supports:
                refuse_sparse_sums(model, cluster, strategy.reduce)
            check_passes(recipe, model, numerics, serves_rows=strategy.serves_rows)
            parts = [*_parts(train_state_of(recipe, model))]
            check_metric([schedule for _, schedule in parts if schedule is not None], strategy, metric)
            for optimizer, schedule in parts:
                refuse_breaking(optimizer)
                refuse_closures(optimizer)
                check_special(optimizer, strategy=type(strategy).__name__, trained=strategy.supports)
                plain = schedule.plain if schedule else None
                check_schedule_free(optimizer, model, plain, averages=averages)
                refuse_unsaved(recipe, model, optimizer, plain)
                strategy.check_built(recipe, model, optimizer)
                if numerics.needs_norm and not isinstance(recipe, MultiUpdateRecipe):
                    refuse_norms_of_others(model, optimizer, numerics)
                if not strategy.serves_rows:
                    check_sparse_steps(model, optimizer)
    except Exception as error:  # any exception: recipes are user code
        return error
    return None


def _check_size(model: Module) -> None:
    for name, parameter in model.named_parameters():
        if (count := parameter.numel() * parameter.element_size()) > _ADDRESSABLE:
            raise _TooLargeError(
                f"{name} of the model has shape {list(parameter.shape)}, {count:.3g} bytes, more than a process can "
                "address. Choose smaller sizes; nothing was started."
            )


def _parts(state: TrainState | MultiTrainState) -> Iterator[tuple[Optimizer, Schedule | None]]:
    for part in state.parts.values() if isinstance(state, MultiTrainState) else (state,):
        yield part.optimizer, part.schedule


def _is_certain(error: Exception) -> bool:
    if isinstance(error, ConfigError):
        return True
    return not isinstance(error, _OF_THIS_HOST) and _OF_A_DEVICE.search(str(error)) is None
