"""Tries a recipe's optimizer on small DTensors, placed as the parameters of a model that ranks have parts of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard  # of FSDP on top of tensor parallelism
from torch.optim import Optimizer

from worldsize.core import ConfigError, Recipe
from worldsize.dist.per_rank import local
from worldsize.optimizers.names import all_parameters
from worldsize.strategies.optimizer_checks import ELEMENTWISE
from worldsize.strategies.optimizer_trial import Trial, described

_ROUNDING = 1e-2  # relative difference of updates: less if the order of sums differs, more if summands are missing


def refuse_wrong_updates(
    recipe: Recipe, model: nn.Module, optimizer: Optimizer, prepare: Callable[[Optimizer], None] = lambda _: None
) -> bool:
    """Refuse an optimizer that does not update DTensors as it updates whole tensors; all ranks must call it.

    Return whether the recipe made other optimizers for a trial. Then it has to make this one again, since a recipe may
    keep the one that it made last.

    Args:
        recipe: Makes the optimizers.
        model: Its model, divided over ranks.
        optimizer: One of them, for the model; torch's own elementwise ones are not tried.
        prepare: Prepares an optimizer for the divided model.

    Raises:
        ConfigError: torch lacks an operation that it needs, or its updates are others.
    """
    if type(optimizer) in ELEMENTWISE or not any(isinstance(each, DTensor) for each in all_parameters(optimizer)):
        return False
    trial = Trial(recipe, model)
    if trial.failure is None and (reason := _difference(trial, model, prepare)):
        raise ConfigError(
            f"{type(optimizer).__name__} {reason}, and this strategy divides parameters over ranks. Use strategy=ddp "
            "or zero, or an optimizer that updates each number by itself, such as optimizer=adamw."
        )
    return True


def _difference(trial: Trial, model: nn.Module, prepare: Callable[[Optimizer], None]) -> str | None:
    """Return how updates of DTensors are wrong; None: they are right."""
    parameters = dict(model.named_parameters())

    def placed(name: str, tensor: Tensor) -> Tensor:
        like = parameters[name]
        if not isinstance(like, DTensor):
            return tensor.to(like.device)
        places = [Shard(each.dim) if isinstance(each, Shard | _StridedShard) else each for each in like.placements]
        return distribute_tensor(tensor.to(like.device), like.device_mesh, places, src_data_rank=None)

    try:
        updated = trial.updated(placed, prepare=prepare)
    except Exception as error:  # of any kind: optimizers are user code, and torch lacks operations
        return f"cannot update DTensors ({described(error)})"
    for name, each in updated.items():
        expected, before = (local(placed(name, values[name])) for values in (trial.result, trial.values))
        if not _close(local(each), expected, before):
            return f"updates {name} differently as a DTensor than whole"
    return None


def _close(actual: Tensor, expected: Tensor, before: Tensor) -> bool:
    """Compare the changes of a parameter of any shape, up to rounding."""
    if not expected.numel():
        return True
    change, apart = (expected - before).abs().max(), (actual - expected).abs().max()
    rounding = 4 * torch.finfo(expected.dtype).eps * before.abs().max()
    return bool(apart <= _ROUNDING * change + rounding)
