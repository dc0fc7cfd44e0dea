"""Steps of optimizers with sharded parameters.

Elementwise optimizers update a rank's shards as plain tensors. With DTensors, torch would infer the sharding of the
result for each operation and shape, with Python overhead per call, which takes longer than the update itself for small
shards. If every operation is elementwise, the result is sharded like the parameter, and has the same bits. Other
optimizers are first tried on small DTensors with the placements of the model's parameters.

Values that a recipe's step hooks assign to ``parameter.data`` are copied to the shards. Many programs update moving
averages in this way (MoCo, BYOL). A DTensor would ignore the assignment: it changes the wrapper, but not the shard.
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

from worldsize.collectives.per_rank import get_local_shard, shard_like
from worldsize.core import ConfigError, Recipe
from worldsize.optimizers.groups import all_parameters
from worldsize.strategies.optimizer_checks import ELEMENTWISE
from worldsize.strategies.optimizer_trial import OptimizerTrial, format_error
from worldsize.strategies.step_hooks import StrategyHook, enclose_steps, hook_name, recipe_hooks, wrap_recipe_hooks

_LOCAL = tuple(kind for kind in ELEMENTWISE if kind is not Adagrad)  # Adagrad creates DTensor state when constructed


def step_locally(optimizer: Optimizer) -> None:
    """Let ``optimizer`` update local shards, if it is one of torch's elementwise optimizers.

    Between steps its parameters are DTensors, and its state is saved and loaded as DTensors. An optimizer with recipe
    step hooks is left unchanged, as hooks may read its parameters or state.
    """
    is_divided = any(isinstance(parameter, DTensor) and parameter.ndim for parameter in all_parameters(optimizer))
    if type(optimizer) in _LOCAL and is_divided and not recipe_hooks(optimizer):
        _LocalSteps(optimizer).register_hooks()


def step_apart(optimizer: Optimizer) -> None:
    """Keep DTensors and plain tensors in separate groups during a step, as torch requires."""
    if len({isinstance(parameter, DTensor) for parameter in all_parameters(optimizer)}) < 2:
        return
    groups: list[dict[str, Any]] = []
    parts: list[list[dict[str, Any]]] = []

    def separate() -> None:
        nonlocal groups, parts
        groups = optimizer.param_groups
        parts = [_separate_group(group) for group in groups]
        optimizer.param_groups = [part for own in parts for part in own]

    def join_groups() -> None:
        optimizer.param_groups = groups
        for group, own in zip(groups, parts, strict=True):
            for part in own:
                group.update({name: value for name, value in part.items() if name != "params"})  # e.g. counters

    enclose_steps(optimizer, separate, join_groups)


def _separate_group(group: dict[str, Any]) -> list[dict[str, Any]]:
    kinds: dict[bool, list[Tensor]] = {}
    for parameter in group["params"]:
        kinds.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    return [group] if len(kinds) < 2 else [{**group, "params": own} for own in kinds.values()]


@final
class _LocalSteps:
    """Replaces an optimizer's DTensor parameters with their local shards during steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._shards = {each: _extract_shard(each) for each in all_parameters(optimizer) if isinstance(each, DTensor)}
        self._wholes = {shard: parameter for parameter, shard in self._shards.items()}

    def register_hooks(self) -> None:
        optimizer = self._optimizer
        optimizer.register_step_pre_hook(StrategyHook(self._enter_step))
        optimizer.register_step_post_hook(StrategyHook(self._leave_step))
        optimizer.register_state_dict_pre_hook(lambda _: self._show_sharded())
        optimizer.register_state_dict_post_hook(lambda _, state: self._show_local())
        optimizer.register_load_state_dict_post_hook(lambda _: self._show_local())
        self._show_local()

    def _enter_step(self) -> None:
        for parameter, shard in self._shards.items():
            shard.data = parameter._local_tensor  # FSDP replaces it when it first gathers the parameter
            shard.grad = None if parameter.grad is None else _local_gradient(parameter)
        self._exchange(self._shards)

    def _leave_step(self) -> None:
        self._exchange(self._wholes)
        for shard in self._wholes:
            shard.grad = None

    def _exchange(self, others: Mapping[Any, Tensor]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]

    def _show_sharded(self) -> None:
        """Replace the state tensors of shards with DTensors that share their memory."""
        state = self._optimizer.state
        for parameter, shard in self._shards.items():
            if shard in state:
                state[parameter] = {key: _wrap_in_dtensor(value, parameter) for key, value in state.pop(shard).items()}

    def _show_local(self) -> None:
        """Undo :meth:`_show_sharded`."""
        state = self._optimizer.state
        for parameter, shard in self._shards.items():
            if parameter in state:
                state[shard] = {
                    key: get_local_shard(value) if isinstance(value, Tensor) else value
                    for key, value in state.pop(parameter).items()
                }


def _extract_shard(parameter: DTensor) -> nn.Parameter:
    return nn.Parameter(get_local_shard(parameter.detach()), parameter.requires_grad)


def _local_gradient(parameter: DTensor) -> Tensor:
    """Return this rank's shard of the gradient, after redistributing a partial gradient."""
    gradient = parameter.grad
    assert isinstance(gradient, DTensor)
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return gradient._local_tensor


def _wrap_in_dtensor(value: Any, parameter: DTensor) -> Any:
    """Wrap a tensor with the local shard's shape in a DTensor placed like ``parameter``."""
    if not isinstance(value, Tensor) or value.shape != parameter._local_tensor.shape:
        return value
    return shard_like(parameter, value)


def carry_assignments(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Let step hooks assign the data of sharded parameters, but not replace a parameter."""
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
    """Runs an optimizer ``hook`` of a recipe, and refuses replacements of sharded parameters.

    ``places``: the module and attribute name of each sharded parameter, by full name.
    """

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
                    f"{self.__qualname__}, a hook of the optimizer, replaces the sharded parameter {name}. Change the "
                    "parameter in place, such as parameter.copy_(value) under torch.no_grad(), or use strategy=ddp."
                )
        return returned


@final
class _Assignments(TorchFunctionMode):
    """Copies values assigned to the data of a DTensor into its shard."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func != Tensor.data.__set__ or not isinstance(args[0], DTensor):  # type: ignore[attr-defined]
            return func(*args, **(kwargs or {}))
        _assign_data(*args)
        return None


@torch.no_grad()
def _assign_data(parameter: DTensor, value: Tensor) -> None:
    if not isinstance(value, DTensor) or (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
        raise ConfigError(
            f"a hook of the optimizer assigns {list(value.shape)} {value.dtype} to the data of a sharded parameter, "
            f"expected {list(parameter.shape)} {parameter.dtype}. Compute the value from sharded parameters of the "
            "same shape and dtype, or use strategy=ddp."
        )
    same = value if value.placements == parameter.placements else value.redistribute(placements=parameter.placements)
    parameter._local_tensor.copy_(same._local_tensor)


_ROUNDING = 1e-2  # relative error of updates: above rounding in sums, below the effect of missing terms


def refuse_wrong_updates(
    recipe: Recipe, model: nn.Module, optimizer: Optimizer, prepare: Callable[[Optimizer], None] = lambda _: None
) -> bool:
    """Refuse an optimizer that updates DTensors differently from whole tensors.

    All ranks must call this. Return whether a trial ran. The recipe must then create ``optimizer`` again, since it may
    keep a reference to the optimizer that it created last.

    Args:
        recipe: Creates the optimizers.
        model: The recipe's model, sharded over ranks.
        optimizer: One of the recipe's optimizers; no trial runs for torch's elementwise optimizers.
        prepare: Prepares an optimizer for the sharded model.

    Raises:
        ConfigError: torch lacks an operation on DTensors that the optimizer needs, or the updates differ.
    """
    if type(optimizer) in ELEMENTWISE or not any(isinstance(each, DTensor) for each in all_parameters(optimizer)):
        return False
    trial = OptimizerTrial(recipe, model)
    if trial.failure is None and (reason := _difference(trial, model, prepare)):
        raise ConfigError(
            f"{type(optimizer).__name__} {reason}, but this strategy shards parameters. Use strategy=ddp or zero, or "
            "an elementwise optimizer such as optimizer=adamw."
        )
    return True


def _difference(trial: OptimizerTrial, model: nn.Module, prepare: Callable[[Optimizer], None]) -> str | None:
    """Return how updates of DTensors are wrong, or None if they are correct."""
    parameters = dict(model.named_parameters())

    def place_tensor(name: str, tensor: Tensor) -> Tensor:
        like = parameters[name]
        if not isinstance(like, DTensor):
            return tensor.to(like.device)
        places = [Shard(each.dim) if isinstance(each, Shard | _StridedShard) else each for each in like.placements]
        return distribute_tensor(tensor.to(like.device), like.device_mesh, places, src_data_rank=None)

    try:
        updated = trial.run_steps(place_tensor, prepare=prepare)
    except Exception as error:  # of any kind: optimizers are user code, and torch lacks operations
        return f"cannot update DTensors ({format_error(error)})"
    for name, each in updated.items():
        expected, before = (
            get_local_shard(place_tensor(name, values[name])) for values in (trial.result, trial.values)
        )
        if not _is_close(get_local_shard(each), expected, before):
            return f"updates {name} differently as a DTensor than as a plain tensor"
    return None


def _is_close(actual: Tensor, expected: Tensor, before: Tensor) -> bool:
    """Compare two updates of a parameter, of any shape, up to rounding."""
    if not expected.numel():
        return True
    change, apart = (expected - before).abs().max(), (actual - expected).abs().max()
    rounding = 4 * torch.finfo(expected.dtype).eps * before.abs().max()
    return bool(apart <= _ROUNDING * change + rounding)
