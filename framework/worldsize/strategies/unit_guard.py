"""Refuses losses that need parameters of a sharded model while they are divided over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _apply_to_tensors
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from worldsize.core import ConfigError, LossOutput
from worldsize.strategies.calling_root import CallingRoot

_MIXED = "mixed torch.Tensor and DTensor"  # in torch's message


def guard_units(root: CallingRoot, *, remedy: str, names_uses: bool) -> None:
    """Refuse a loss that needs parameters while they are divided over ranks, during the pass that does so.

    Such a loss reads a parameter of a unit outside the unit's forward pass, or takes a derivative through a unit.
    Parameters that FSDP gathers for ``root`` itself are whole as long as the loss is computed.

    Args:
        root: The module around the sharded model.
        remedy: The end of the message.
        names_uses: Whether to watch the first call so that the message can name the parameter. Code that is compiled
            then is compiled once more.
    """
    model, sharded = root.model, list[Any](root.modules())
    units: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    groups = sharded[0]._get_fsdp_state()._fsdp_param_groups if isinstance(sharded[0], FSDPModule) else ()
    places = [each._module_info for group in groups for each in group.fsdp_params]
    gathered = {id(getattr(place.module, place.param_name)) for place in places}
    named = [pair for pair in model.named_parameters() if isinstance(pair[1], DTensor) and id(pair[1]) not in gathered]
    if named:
        root.guard(_Guard(units, dict(named), remedy=remedy, names_uses=names_uses).call)


def cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point inputs of ``model`` to ``dtype``, as a module does that FSDP gathers in it."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def convert(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return _apply_to_tensors(cast, args), _apply_to_tensors(cast, kwargs)

    model.register_forward_pre_hook(convert, prepend=True, with_kwargs=True)


@final
class _Guard:
    """Watches ``units``, and parameters that are ``divided`` over ranks outside of them, by their names."""

    def __init__(
        self, units: Mapping[str, nn.Module], divided: Mapping[str, nn.Parameter], *, remedy: str, names_uses: bool
    ) -> None:
        self._remedy, self._is_in_loss = remedy, False
        self._uses = _Uses(divided) if names_uses else None  # until the first loss has been computed
        self._leaves: list[Any] = []  # nodes of autograd's graph, which end when nobody keeps them
        for name, unit in units.items():
            unit.register_forward_hook(partial(self._watch_outputs, name))
            for own, parameter in unit.named_parameters(name):
                if own in divided and parameter.requires_grad:
                    self._watch_gradient(own, parameter)

    def call(self, action: Callable[[], Any]) -> Any:
        uses, self._uses = self._uses, None
        self._is_in_loss = True
        try:
            with uses or nullcontext():
                returned = action()
            if any(isinstance(each, DTensor) and each.requires_grad for each in _tensors(returned)):
                raise self._refusal(uses.last if uses else "")  # its backward pass would mix both kinds of tensors
            return returned
        except RuntimeError as error:
            if _MIXED not in str(error):
                raise
            raise self._refusal(uses.last if uses else "") from error
        finally:
            self._is_in_loss = False

    def _watch_gradient(self, name: str, parameter: nn.Parameter) -> None:
        """Refuse a gradient by way of autograd; FSDP itself sets that of a shard."""

        def refuse(_: Any) -> None:
            raise self._refusal(name)

        leaf = get_gradient_edge(parameter).node
        leaf.register_prehook(refuse)
        self._leaves.append(leaf)

    def _watch_outputs(self, name: str, unit: nn.Module, args: Any, output: Any) -> None:
        def refuse(_: Tensor) -> None:
            if self._is_in_loss:
                raise ConfigError(
                    f"the loss takes a derivative through {name}, whose parameters are not gathered any more when the "
                    f"loss itself is differentiated. {self._remedy}"
                )

        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(refuse)  # type: ignore[no-untyped-call]

    def _refusal(self, name: str) -> ConfigError:
        return ConfigError(
            f"the loss computes with {name or 'a parameter'} outside the forward pass of its module, where each rank "
            f"has a part of it. {self._remedy}"
        )


def _tensors(returned: Any) -> list[Any]:
    """Return what a loss may have returned, one by one."""
    return tree_leaves([each.loss if isinstance(each, LossOutput) else each for each in tree_leaves(returned)])


@final
class _Uses(TorchFunctionMode):
    """Notes the last parameter, of ``named``, that a function of torch was called with."""

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
