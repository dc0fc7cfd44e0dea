"""Builds a recipe on the meta device, to refuse invalid recipes before a run starts."""

from __future__ import annotations

import logging
import re
from functools import partial

import torch
from torch.nn import Module

from worldsize.config.instantiate import describe_failure
from worldsize.core import Cluster, ConfigError, FeatureRecipe, Numerics, Recipe, Strategy
from worldsize.optimizers.schedule_free import check_schedule_free, check_special, refuse_breaking
from worldsize.seeds import keep_generators
from worldsize.strategies.declared_buffers import declare_buffers
from worldsize.strategies.gradient_reducer import refuse_norms_of_others
from worldsize.strategies.model_passes import check_passes
from worldsize.strategies.optimizer_checks import (
    check_sparse_steps,
    refuse_closures,
    refuse_sparse_sums,
    refuse_unsaved,
)
from worldsize.strategies.schedules import check_metric
from worldsize.strategies.train_state import TrainState

_logger = logging.getLogger(__name__)

_OVERFLOW = re.compile(r"Storage size calculation overflowed|multiplication overflow")  # torch errors for byte sizes
_ADDRESSABLE = 1 << 47  # bytes addressable by a process on x86-64

# errors that may occur only on this host: the processes may run where the file, package or memory is available
_OF_THIS_HOST = (OSError, ImportError, MemoryError, NotImplementedError)
_OF_A_DEVICE = re.compile(r"\b(meta|cuda|device|gpu|memory)\b", re.IGNORECASE)


class _TooLargeError(ConfigError):
    """A model too large for any process, so that retrying on the CPU is pointless."""


def check_trainable(recipe: Recipe, strategy: Strategy) -> None:
    """Check that ``strategy`` can train this kind of recipe.

    Raises:
        ConfigError: ``strategy`` does not support the recipe, or the recipe overrides a reserved method.
    """
    if recipe.has_several_updates and "multi_update" not in strategy.supports:
        raise ConfigError(
            f"{type(recipe).__name__} requires several updates per step, but {type(strategy).__name__} "
            "supports one: all gradients are summed and clipped together at the end of a step. Set "
            "strategy=ddp, zero, fsdp or single."
        )
    for name in () if recipe.has_several_updates else ("optimizers", "schedules", "micro_batch_updates"):
        if getattr(type(recipe), name) is not getattr(Recipe, name):
            raise ConfigError(
                f"{type(recipe).__name__} defines {name}, which is reserved for several updates per step. Derive "
                "the recipe from worldsize.core.MultiUpdateRecipe, or rename the method."
            )
    if isinstance(recipe, FeatureRecipe) and "features" not in strategy.supports:
        raise ConfigError(
            f"the loss of {type(recipe).__name__} requires the features of all logical ranks, but "
            f"{type(strategy).__name__} does not gather features. Set strategy=ddp, zero, fsdp, mesh or "
            "single."
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
    """Build model, optimizers and schedules on the meta device, which does not use memory.

    Then check that ``strategy`` supports them, that ``numerics`` (default: Numerics()) suit the model, and that
    processes of ``cluster``, unless None, can sum its gradients. ``averages``: whether the run averages weights.
    ``schedule_metric``: the metric that advances its schedule.

    After a failure, the build is repeated on the CPU, as in every process. Only a failure that recurs is raised here;
    one that may be due to this host or device is left to the processes.

    Raises:
        ConfigError: the arguments of the recipe, the optimizer or the schedule are invalid, or do not work with
            ``strategy``.
    """
    numerics = numerics or Numerics()
    failure = partial(_try_build, recipe, strategy, numerics, cluster, averages, schedule_metric)
    failed = failure("meta")
    if failed is None or not _is_certain(failed):
        return
    is_too_large = isinstance(failed, _TooLargeError) or _OVERFLOW.search(str(failed))
    again = failed if is_too_large else failure("cpu")
    if again is None or (type(again), str(again)) != (type(failed), str(failed)):
        _logger.debug("the recipe can be built only on the CPU: %s", failed)
        return
    if isinstance(again, ConfigError):
        raise again
    raise ConfigError(
        f"{type(recipe).__name__} cannot be built: {describe_failure(again)}. No process was started. "
        "Change the options under recipe, optimizer or schedule."
    ) from again


def _try_build(
    recipe: Recipe,
    strategy: Strategy,
    numerics: Numerics,
    cluster: Cluster | None,
    averages: bool,
    metric: str | None,
    device: str,
) -> Exception | None:
    try:
        with keep_generators(), torch.device(device):  # the training processes are forked from this one
            model = recipe.model()
            _check_size(model)
            declare_buffers(recipe, model)
            if isinstance(recipe, FeatureRecipe) and numerics.policy.scales_loss:
                raise ConfigError(
                    f"precision={numerics.precision} is not supported with a FeatureRecipe: feature gradients are not "
                    f"loss-scaled and may underflow {numerics.policy.autocast}. Set precision=bf16."
                )
            if cluster is not None and "sparse_gradients" in strategy.supports:
                refuse_sparse_sums(model, cluster, strategy.reduce)
            check_passes(recipe, model, numerics, serves_rows=strategy.serves_rows)
            state = TrainState.from_recipe(recipe, model)
            check_metric(state.schedules, strategy, metric)
            for part in state.parts.values():
                optimizer, plain = part.optimizer, part.schedule.plain if part.schedule else None
                refuse_breaking(optimizer)
                refuse_closures(optimizer)
                check_special(optimizer, strategy=type(strategy).__name__, trained=strategy.supports)
                check_schedule_free(optimizer, model, plain, averages=averages)
                refuse_unsaved(recipe, model, optimizer, plain)
                strategy.check_built(recipe, model, optimizer)
                if numerics.needs_norm and not recipe.has_several_updates:
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
                f"parameter {name} has shape {list(parameter.shape)} and requires {count:.3g} bytes, more than "
                "the address space of a process. No process was started. Choose a smaller model."
            )


def _is_certain(error: Exception) -> bool:
    if isinstance(error, ConfigError):
        return True
    return not isinstance(error, _OF_THIS_HOST) and _OF_A_DEVICE.search(str(error)) is None
