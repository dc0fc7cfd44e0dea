"""Steps of optimizers whose parameters are divided over ranks.

An optimizer that treats each number by itself updates the shards of a rank as plain tensors. With DTensors, torch
determines for each operation of the update and each shape how the result is sharded, and passes through Python for
each call: for small shards this takes longer than the update itself. Where every operation is elementwise the result
is sharded as the parameter is, and has the same bits. Others are tried first, on small DTensors that are placed as
the parameters of a model that ranks have parts of.

Weights that a recipe's step hooks assign as ``parameter.data = ...`` are carried to the shards. Many programs write
their moving averages so (MoCo, BYOL). A DTensor ignores the assignment: the new value goes to the wrapper, while the
shard behind it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import Adagrad, Optimizer
from torch.overrides import TorchFunctionMode

from worldsize.collectives.per_rank import local, sharded_like
from worldsize.core import ConfigError, Recipe
from worldsize.optimizers.groups import all_parameters
from worldsize.strategies.optimizer_checks import ELEMENTWISE
from worldsize.strategies.optimizer_trial import OptimizerTrial, described
from worldsize.strategies.step_hooks import StrategyHook, enclose_steps, hook_name, recipe_hooks, wrap_recipe_hooks

_LOCAL = tuple(kind for kind in ELEMENTWISE if kind is not Adagrad)  # which makes its state of DTensors, before a step


def step_locally(optimizer: Optimizer) -> None:
    """Let the steps of ``optimizer`` update local shards, if it is one of torch's that are elementwise.

    Its parameters are DTensors before and after each step, and its state is saved and loaded as DTensors. An optimizer
    with step hooks of the recipe, which may read its parameters or its state, stays as it is.
    """
    is_divided = any(isinstance(parameter, DTensor) and parameter.ndim for parameter in all_parameters(optimizer))
    if type(optimizer) in _LOCAL and is_divided and not recipe_hooks(optimizer):
        _LocalSteps(optimizer).begin()


def step_apart(optimizer: Optimizer) -> None:
    """Separate DTensors and plain tensors into different groups during a step, since no kernel takes both."""
    if len({isinstance(parameter, DTensor) for parameter in all_parameters(optimizer)}) < 2:
        return
    groups: list[dict[str, Any]] = []
    parts: list[list[dict[str, Any]]] = []

    def separate() -> None:
        nonlocal groups, parts
        groups = optimizer.param_groups
        parts = [_separated(group) for group in groups]
        optimizer.param_groups = [part for own in parts for part in own]

    def join() -> None:
        optimizer.param_groups = groups
        for group, own in zip(groups, parts, strict=True):
            for part in own:
                group.update({name: value for name, value in part.items() if name != "params"})  # such as counters

    enclose_steps(optimizer, separate, join)


def _separated(group: dict[str, Any]) -> list[dict[str, Any]]:
    kinds: dict[bool, list[Tensor]] = {}
    for parameter in group["params"]:
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return [group] if len(kinds) < 2 else [{**group, "params": own} for own in kinds.values()]


@final
class _LocalSteps:
    """Exchanges the parameters of an optimizer, DTensors, for their shards while it steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._shards = {each: _shard(each) for each in all_parameters(optimizer) if isinstance(each, DTensor)}
        self._wholes = {shard: parameter for parameter, shard in self._shards.items()}

    def begin(self) -> None:
        optimizer = self._optimizer
        optimizer.register_step_pre_hook(StrategyHook(self._enter))
        optimizer.register_step_post_hook(StrategyHook(self._leave))
        optimizer.register_state_dict_pre_hook(lambda _: self._show_sharded())
        optimizer.register_state_dict_post_hook(lambda _, state: self._show_local())
        optimizer.register_load_state_dict_post_hook(lambda _: self._show_local())
        self._show_local()

    def _enter(self) -> None:
        for parameter, shard in self._shards.items():
            shard.data = parameter._local_tensor  # which FSDP replaces when it first gathers the parameter
            shard.grad = None if parameter.grad is None else _local_gradient(parameter)
        self._exchange(self._shards)

    def _leave(self) -> None:
        self._exchange(self._wholes)
        for shard in self._wholes:
            shard.grad = None

    def _exchange(self, others: Mapping[Any, Tensor]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]

    def _show_sharded(self) -> None:
        """Replace the plain tensors that are the state of a shard by DTensors that share their memory."""
        state = self._optimizer.state
        for parameter, shard in self._shards.items():
            if shard in state:
                state[parameter] = {key: _sharded(value, parameter) for key, value in state.pop(shard).items()}

    def _show_local(self) -> None:
        """Undo :meth:`_show_sharded`."""
        state = self._optimizer.state
        for parameter, shard in self._shards.items():
            if parameter in state:
                state[shard] = {
                    key: local(value) if isinstance(value, Tensor) else value
                    for key, value in state.pop(parameter).items()
                }


def _shard(parameter: DTensor) -> nn.Parameter:
    return nn.Parameter(local(parameter.detach()), parameter.requires_grad)


def _local_gradient(parameter: DTensor) -> Tensor:
    """Return this rank's part of the gradient; with tensor parallelism each rank may have a summand of it."""
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient._local_tensor


def _sharded(value: Any, parameter: DTensor) -> Any:
    """Return a tensor of the shape of the local shard as a part of one that is sharded as ``parameter`` is."""
    if not isinstance(value, Tensor) or value.shape != parameter._local_tensor.shape:
        return value
    return sharded_like(parameter, value)


def carry_assignments(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Let step hooks assign the data of divided parameters of ``model``; refuse hooks that replace a parameter."""
    places = {
        f"{prefix}.{own}".lstrip("."): (module, own)
        for prefix, module in model.named_modules()
        for own, parameter in module._parameters.items()
        if isinstance(parameter, DTensor)
    }
    for optimizer in optimizers:
        wrap_recipe_hooks(optimizer, lambda hook: _CarriedHook(hook, places))


_Places = Mapping[str, tuple[nn.Module, str]]


@final
class _CarriedHook:
    """Runs ``hook`` of a recipe; ``places``: the modules of the divided parameters, by the names in the model."""

    def __init__(self, hook: Callable[..., Any], places: _Places) -> None:
        self._hook, self._places = hook, places
        self.__qualname__ = hook_name(hook)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = [module._parameters[own] for module, own in self._places.values()]
        with _Assignments():
            returned = self._hook(*args, **kwargs)
        for (name, (module, own)), parameter in zip(self._places.items(), before, strict=True):
            if module._parameters[own] is not parameter:
                raise ConfigError(
                    f"{self.__qualname__}, a hook of the optimizer, puts a new parameter in the place of {name}, whose "
                    "parts are on several ranks. Change the old one in place, such as parameter.copy_(value) under "
                    "torch.no_grad(), or use strategy=ddp."
                )
        return returned


@final
class _Assignments(TorchFunctionMode):
    """Copies a value that is assigned to the data of a DTensor into its shard."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func != Tensor.data.__set__ or not isinstance(args[0], DTensor):  # type: ignore[attr-defined]
            return func(*args, **(kwargs or {}))
        _assign(*args)
        return None


@torch.no_grad()
def _assign(parameter: DTensor, value: Tensor) -> None:
    if not isinstance(value, DTensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        raise ConfigError(
            f"a hook of the optimizer assigns {list(value.shape)} of {value.dtype} to the data of a parameter "
            f"{list(parameter.shape)} of {parameter.dtype}, whose parts are on several ranks. Make it of parameters "
            "with the same shape and dtype, or use strategy=ddp."
        )
    same = value if value.placements == parameter.placements else value.redistribute(placements=parameter.placements)
    parameter._local_tensor.copy_(same._local_tensor)


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
    trial = OptimizerTrial(recipe, model)
    if trial.failure is None and (reason := _difference(trial, model, prepare)):
        raise ConfigError(
            f"{type(optimizer).__name__} {reason}, and this strategy divides parameters over ranks. Use strategy=ddp "
            "or zero, or an optimizer that updates each number by itself, such as optimizer=adamw."
        )
    return True


def _difference(trial: OptimizerTrial, model: nn.Module, prepare: Callable[[Optimizer], None]) -> str | None:
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
