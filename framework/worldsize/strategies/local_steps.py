"""Lets an optimizer that treats each number by itself update the shards of a rank as plain tensors.

With DTensors, torch determines for each operation of the update and each shape how the result is sharded, and passes
through Python for each call: for small shards this takes longer than the update itself. Where every operation is
elementwise the result is sharded as the parameter is, and has the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adagrad, Optimizer

from worldsize.dist.per_rank import local, sharded_like
from worldsize.optimizers.names import all_parameters
from worldsize.strategies.optimizer_checks import ELEMENTWISE
from worldsize.strategies.step_hooks import StrategyHook, enclose_steps, recipe_hooks

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
