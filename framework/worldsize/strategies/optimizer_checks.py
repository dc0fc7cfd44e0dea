"""Checks that refuse optimizers which a strategy or checkpoint does not support.

Examples are optimizers whose step evaluates the loss several times through a closure, and optimizers that do not
support sparse gradients, or keep sparse state for them, which checkpoints cannot store.
"""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim.lr_scheduler import LRScheduler

from worldsize.checkpoint.manifest_tree import split_tensors
from worldsize.core import Cluster, ConfigError, Recipe, Reduction
from worldsize.devices import backend_for
from worldsize.errors import CheckpointError
from worldsize.optimizers.schedule_free import get_special_kind
from worldsize.strategies.optimizer_trial import OptimizerTrial, divides_extra_state, has_extra_state
from worldsize.strategies.step_hooks import disable_recipe_hooks
from worldsize.strategies.train_state import extra_state
from worldsize.strategies.wrapping import sparse_embeddings
from worldsize.world.processes import gpus_hidden

_logger = logging.getLogger(__name__)

# elementwise optimizers of torch, excluding subclasses
ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)

_LACKS = "state_dict() does not contain its full state (a counter, for example)"
_KEEP = "Store the full state in the optimizer's state or param_groups."


def updates_apart(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is known to update each parameter independently."""
    return type(optimizer) in ELEMENTWISE or get_special_kind(optimizer) == "adamw_8bit"


def updates_elements(recipe: Recipe, model: nn.Module, optimizer: Optimizer, *, dims: Sequence[int] = (0,)) -> bool:
    """Return whether shards of each parameter along ``dims`` can be updated independently.

    Args:
        recipe: Creates the optimizers.
        model: The recipe's model, whose tensors may be on the meta device.
        optimizer: One of the recipe's optimizers; no trial runs for torch's elementwise optimizers.
        dims: Dimensions along which parameters may be sharded.
    """
    return type(optimizer) in ELEMENTWISE or _updates_parts(OptimizerTrial(recipe, model), dims)


def _updates_parts(trial: OptimizerTrial, dims: Sequence[int]) -> bool:
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
    """Refuse an optimizer whose updates depend on shard boundaries, if these can change.

    With ``reduce="ordered"``, bits must not depend on the boundaries; if the gang ``heals``, the boundaries change
    during a run.

    Raises:
        ConfigError: shards of a parameter are updated differently than the whole.
    """
    if (reduce != "ordered" and not heals) or type(optimizer) in ELEMENTWISE:
        return
    trial = OptimizerTrial(recipe, model)
    if _updates_parts(trial, dims):
        return
    failure = trial.failure
    finding = (
        f"could not be tested on small tensors ({failure})"
        if failure
        else "updates shards differently from whole parameters, for example because of a norm"
    )
    raise ConfigError(
        f"{type(optimizer).__name__} {finding}, but shard boundaries depend on the number of processes with this "
        "strategy. Use strategy=ddp or zero, or an elementwise optimizer such as optimizer=adamw"
        f"{', or reproducibility=seeded' if reduce == 'ordered' and not heals else ''}."
    )


def refuse_joint_updates(recipe: Recipe, model: nn.Module, optimizer: Optimizer, *, because: str) -> None:
    """Refuse an optimizer whose update of a parameter depends on other parameters.

    Raises:
        ConfigError: it does, for example through a global norm; ``because``: why this is not supported.
    """
    if updates_apart(optimizer):
        return
    trial = OptimizerTrial(recipe, model)
    if trial.failure is None and (reason := trial.joint):
        raise ConfigError(
            f"{type(optimizer).__name__} {reason}, but {because}. Use strategy=ddp, or an optimizer that updates each "
            "parameter independently, such as optimizer=adamw."
        )


def refuse_divided_state(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer with extra ``state_dict()`` entries that would differ between ranks.

    Raises:
        ConfigError: it has such an entry besides ``state`` and ``param_groups``.
    """
    if updates_apart(optimizer):
        return
    trial = OptimizerTrial(recipe, model)
    if extra_state(optimizer) if trial.failure else divides_extra_state(trial):
        raise ConfigError(
            _format_unshared_error(optimizer, "each rank updates only a part of the parameters with this strategy")
        )


def refuse_extra_state(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer with additional ``state_dict()`` entries, which servers do not save.

    Raises:
        ConfigError: it has such an entry.
    """
    if updates_apart(optimizer):
        return
    trial = OptimizerTrial(recipe, model)
    if extra_state(optimizer) if trial.failure else has_extra_state(trial):
        raise ConfigError(
            _format_unshared_error(optimizer, "each server has a separate optimizer for its part of the parameters")
        )


def _format_unshared_error(optimizer: Optimizer, because: str) -> str:
    return (
        f"{type(optimizer).__name__}.state_dict() has entries besides state and param_groups, but {because}. Store "
        "them in the optimizer's state or param_groups, or use strategy=ddp."
    )


def refuse_unsaved(recipe: Recipe, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None) -> None:
    """Refuse optimizers and schedules with state that checkpoints do not support.

    Raises:
        ConfigError: the state of either has an unsupported value.
    """
    options = [{**group, "params": []} for group in optimizer.param_groups]
    made = {"optimizer": {"param_groups": options}, "schedule": schedule.state_dict() if schedule else {}}
    try:
        split_tensors(made)
        is_torchs = schedule is None or type(schedule).__module__ == "torch.optim.lr_scheduler"
        if is_torchs and updates_apart(optimizer):
            return
        trial = OptimizerTrial(recipe, model)
        if trial.failure is not None:
            return
        for state in trial.states:
            split_tensors(state)
    except CheckpointError as error:
        kinds = [type(optimizer).__name__, *([type(schedule).__name__] if schedule else [])]
        raise ConfigError(f"{' and '.join(kinds)}: {error}") from error
    if not trial.resumes:
        _logger.warning(
            "%s.%s, so a resumed or restarted run trains differently. %s", type(optimizer).__name__, _LACKS, _KEEP
        )


def refuse_unsent(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer whose full state cannot be sent to a replacement process.

    Raises:
        ConfigError: its ``state_dict`` lacks a part of its state.
    """
    if updates_apart(optimizer):
        return
    trial = OptimizerTrial(recipe, model)
    if trial.failure is None and not trial.resumes:
        raise ConfigError(
            f"{type(optimizer).__name__}.{_LACKS}, so a replacement process cannot restore it. {_KEEP} Or set "
            "strategy.on_failure=restart."
        )


def refuse_closures(optimizer: Optimizer) -> None:
    """Raise ConfigError if ``optimizer`` needs a closure; do not use the optimizer afterwards.

    With a closure, the step repeats the forward and backward pass with different weights, as in LBFGS and
    sharpness-aware minimization. LBFGS also keeps lists of tensors, which checkpoints do not support.
    """
    try:
        with gpus_hidden(), disable_recipe_hooks(optimizer):
            optimizer.step()  # without gradients, it does not change weights
    except Exception as error:  # any exception: the optimizer may be user code
        if re.search(r"\bclosure\b", str(error)) is None:
            return  # a different check, or the first step, reports it
        raise ConfigError(
            f"{type(optimizer).__name__} is not supported, because it requires a closure: the loss is computed only "
            "once per update. Use an optimizer without a closure, such as AdamW or Muon."
        ) from None


def check_sparse_steps(model: nn.Module, optimizer: Optimizer) -> None:
    """Check that each group with a sparse embedding supports sparse gradients.

    Raises:
        ConfigError: a group does not support them, or keeps sparse state, which checkpoints do not support.
    """
    names = {id(embedding.weight): name for name, embedding in sparse_embeddings(model).items()}
    for group in optimizer.param_groups:
        for name in [names[id(parameter)] for parameter in group["params"] if id(parameter) in names][:1]:
            _check_group(optimizer, group, name)


def refuse_sparse_sums(model: nn.Module, cluster: Cluster, reduce: Reduction) -> None:
    """Raise ConfigError if ``model`` has sparse gradients that cannot be reduced on ``cluster``.

    NCCL does not support sparse tensors, and all reductions except torch's flat all-reduce need dense buckets.
    """
    if cluster.processes == 1:
        return
    is_nccl = backend_for(cluster.backend, cluster.device) == "nccl"
    for name in sparse_embeddings(model) if is_nccl or reduce != "flat" else ():
        who = "NCCL" if is_nccl else f"strategy.reduce={reduce}"
        other = "cluster.backend=gloo" if is_nccl else "strategy.reduce=flat with reproducibility=deterministic"
        raise ConfigError(
            f"{who} does not support sparse gradients: {name} has sparse=True. Set sparse=False, {other}, or a "
            "strategy with servers for rows, such as parameter_server."
        )


def _check_group(optimizer: Optimizer, group: Mapping[str, Any], name: str) -> None:
    kind = type(optimizer).__name__
    try:
        state = _state_after_step(type(optimizer), group)
    except RuntimeError as error:
        raise ConfigError(
            f"{kind} with these options does not support sparse gradients ({error}): {name} has sparse=True. Set "
            "sparse=False; or use SparseAdam, Adagrad, or SGD without momentum and weight decay; or use a strategy "
            "with servers for rows, such as parameter_server."
        ) from None
    for key in state:
        raise ConfigError(
            f"{kind} keeps a sparse {key} for {name} (sparse=True), which checkpoints do not support. Set momentum=0, "
            "use SparseAdam or Adagrad, or set sparse=False."
        )


def _state_after_step(kind: type[Optimizer], group: Mapping[str, Any]) -> list[str]:
    """Return the names of sparse state tensors after one step with the options of ``group``."""
    taken = inspect.signature(kind).parameters
    with torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns if an optimizer creates sparse tensors unchecked
        rows = nn.Parameter(torch.zeros(2, 1))
        rows.grad = torch.sparse_coo_tensor(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), (2, 1))
        try:
            made = kind([rows], **{key: value for key, value in group.items() if key in taken and key != "params"})
        except Exception:  # a custom class with a different constructor
            return []
        with gpus_hidden():
            made.step()
    state = made.state.get(rows, {})
    return [key for key, value in state.items() if isinstance(value, Tensor) and value.layout != torch.strided]
