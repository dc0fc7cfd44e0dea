"""Sharding of units with ``fully_shard``, and checks of losses that need whole parameters.

DTensors are detached without torch's sharding propagation, since the result has the same sharding. For each shape,
propagation takes more than a millisecond. fully_shard detaches every parameter, so this dominates its time for a model
with many shapes, and the members of a gang shard their models again after each change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from worldsize.core import ConfigError, LossOutput, Recipe
from worldsize.strategies.model_replica import CallingRoot
from worldsize.strategies.wrapping import Wrap, find_scalars, find_units


def shard_units(
    recipe: Recipe, model: nn.Module, roots: Sequence[nn.Module], *, wrap: Wrap, least: int, **options: Any
) -> None:
    """Apply ``fully_shard`` with ``options`` to the units below ``roots``, then to ``roots``."""
    mine, options["ignored_params"] = {part for root in roots for part in root.modules()}, find_scalars(model)
    for module in (
        *(unit for unit in find_units(recipe, model, wrap, least) if unit in mine and unit not in roots),
        *roots,
    ):
        if module in roots:
            fully_shard(module, **options)
            continue
        module.register_forward_pre_hook(_join_repeated, prepend=True, with_kwargs=True)
        fully_shard(module, **options)  # its hook runs between the other two
        module.register_forward_pre_hook(_part_repeated, prepend=True, with_kwargs=True)


@final
@dataclass(frozen=True)
class _Repeated:
    """Placeholder for an argument that is the same tensor as argument ``index``."""

    index: int


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _part_repeated(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    """Replace repeated tensor arguments with placeholders.

    FSDP would create a new tensor for each argument. Modules such as torch's attention check whether arguments are the
    same tensor, and take a different path, with a different order of gradient accumulation, if they are not.
    """
    values, first = [*args, *kwargs.values()], dict[int, int]()
    repeated = False
    for index, value in enumerate(values):
        if isinstance(value, Tensor) and first.setdefault(id(value), index) != index:
            values[index], repeated = _Repeated(first[id(value)]), True
    return _rebuild_arguments(values, len(args), kwargs) if repeated else None


def _join_repeated(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments | None:
    """Undo :func:`_part_repeated`."""
    values = [*args, *kwargs.values()]
    if not any(isinstance(value, _Repeated) for value in values):
        return None
    joined = [values[value.index] if isinstance(value, _Repeated) else value for value in values]
    return _rebuild_arguments(joined, len(args), kwargs)


def _rebuild_arguments(values: Sequence[Any], count: int, kwargs: Mapping[str, Any]) -> _Arguments:
    return tuple(values[:count]), dict(zip(kwargs, values[count:], strict=True))


def detach_shards() -> None:
    """Make all DTensors in this process detach through their shards from now on."""
    with suppress(AttributeError):  # other torch versions lack the table
        DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten.detach.default] = _detach_shard


def _detach_shard(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> DTensor:
    tensor = cast("DTensor", args[0])
    return DTensor(tensor._local_tensor.detach(), tensor._spec, requires_grad=False)


_MIXED = "mixed torch.Tensor and DTensor"  # in torch's message


def guard_units(root: CallingRoot, *, remedy: str, names_uses: bool) -> None:
    """Refuse a loss that needs parameters while they are sharded.

    Such a loss reads a parameter of a unit outside the unit's forward pass, or differentiates through a unit.
    Parameters that FSDP gathers for ``root`` itself are whole during the entire loss computation.

    Args:
        root: The module around the sharded model.
        remedy: The end of the message.
        names_uses: Whether to watch the first call so that the message can name the parameter. Code compiled during
            that call is compiled again later.
    """
    model, sharded = root.model, list[Any](root.modules())
    units: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    groups = sharded[0]._get_fsdp_state()._fsdp_param_groups if isinstance(sharded[0], FSDPModule) else ()
    places = [each._module_info for group in groups for each in group.fsdp_params]
    gathered = {id(getattr(place.module, place.param_name)) for place in places}
    named = [pair for pair in model.named_parameters() if isinstance(pair[1], DTensor) and id(pair[1]) not in gathered]
    if named:
        root.set_guard(_Guard(units, dict(named), remedy=remedy, names_uses=names_uses).run_guarded)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point inputs of ``model`` to ``dtype``, as FSDP does."""

    def cast_tensor(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def cast_arguments(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _apply_to_tensors(cast_tensor, args), _apply_to_tensors(cast_tensor, kwargs)

    model.register_forward_pre_hook(cast_arguments, prepend=True, with_kwargs=True)


@final
class _Guard:
    """Refuses losses that read a parameter in ``divided`` or differentiate through ``units``."""

    def __init__(
        self, units: Mapping[str, nn.Module], divided: Mapping[str, nn.Parameter], *, remedy: str, names_uses: bool
    ) -> None:
        self._remedy, self._is_in_loss = remedy, False
        self._uses = _Uses(divided) if names_uses else None  # only for the first loss
        self._leaves: list[Any] = []  # nodes of the autograd graph, kept alive
        for name, unit in units.items():
            unit.register_forward_hook(partial(self._watch_outputs, name))
            for own, parameter in unit.named_parameters(name):
                if own in divided and parameter.requires_grad:
                    self._watch_gradient(own, parameter)

    def run_guarded(self, action: Callable[[], Any]) -> Any:
        uses, self._uses = self._uses, None
        self._is_in_loss = True
        try:
            with uses or nullcontext():
                returned = action()
            if any(isinstance(each, DTensor) and each.requires_grad for each in _flatten_result(returned)):
                raise self._build_use_error(uses.last if uses else "")  # backward would mix DTensors and plain tensors
            return returned
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise self._build_use_error(uses.last if uses else "") from error
        finally:
            self._is_in_loss = False

    def _watch_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Refuse gradients from autograd; FSDP sets the gradients of shards directly."""

        def refuse_gradient(_: Any) -> None:
            raise self._build_use_error(name)

        leaf = get_gradient_edge(parameter).node
        leaf.register_prehook(refuse_gradient)
        self._leaves.append(leaf)

    def _watch_outputs(self, name: str, unit: nn.Module, args: Any, output: Any) -> None:
        def refuse_derivative(_: Tensor) -> None:
            if self._is_in_loss:
                raise ConfigError(
                    f"the loss takes a derivative through {name}, but its parameters are no longer gathered when the "
                    f"loss is differentiated. {self._remedy}"
                )

        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(refuse_derivative)  # type: ignore[no-untyped-call]

    def _build_use_error(self, name: str) -> ConfigError:
        return ConfigError(
            f"the loss uses {name or 'a parameter'} outside the forward pass of its module, where each rank has only a "
            f"shard. {self._remedy}"
        )


def _flatten_result(returned: Any) -> list[Any]:
    """Return the tensors in a loss's result."""
    return tree_leaves([each.loss if isinstance(each, LossOutput) else each for each in tree_leaves(returned)])


@final
class _Uses(TorchFunctionMode):
    """Records the last parameter in ``named`` that was passed to a torch function."""

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in named.items()}
        self.last = ""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for each in args:
            self.last = self._names.get(id(each), self.last)
        return func(*args, **(kwargs or {}))
