"""Sharded optimizer state, in which tensors of other ranks are on the meta device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from worldsize.core import Recipe, StateDict
from worldsize.strategies.deferred.fakes import HostFakes
from worldsize.strategies.train_state import OptimizerState, TrainState, collect_named_state, load_named_state

_logger = logging.getLogger(__name__)


def meta_states(recipe: Recipe, model: nn.Module) -> Mapping[str, StateDict]:
    """Return the unsharded state of each optimizer of ``model`` by name, on the meta device."""

    def collect_states(copied: nn.Module) -> StateDict:
        return {name: part.state() for name, part in TrainState.from_recipe(recipe, copied).parts.items()}

    return _compute_meta_state(collect_states, model)


def _compute_meta_state(state_of: Callable[[nn.Module], StateDict], model: nn.Module) -> StateDict:
    """Return ``state_of`` applied to a memoryless copy of ``model``, on the meta device."""
    try:
        with _AnyValue(), _copy_model(model, "meta") as copied:
            return _convert_to_meta(state_of(copied))
    except RuntimeError:  # fused optimizers do not support the meta device
        with HostFakes(), _AnyValue(), _copy_model(model, "cpu") as copied:
            state = state_of(copied)
        return _convert_to_meta(state)


@final
class _AnyValue(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes ``.item()`` return 1 (bool: False), since shapes do not depend on tensor values."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _copy_model(model: nn.Module, device: str) -> Iterator[nn.Module]:
    """Yield ``model`` with empty tensors on ``device``: a copy, or itself if not copyable."""
    try:
        copied = _deep_copy(model, device)
    except Exception as error:  # any exception: objects such as locks, files and generators cannot be copied
        _logger.debug("%s cannot be copied: %s", type(model).__name__, error)
    else:
        yield copied
        return
    with ExitStack() as stack:
        new: dict[Tensor, Tensor] = {}
        tables: Any = [table for module in model.modules() for table in (module._parameters, module._buffers)]
        for table in tables:
            stack.callback(table.update, dict(table))
            present = {name: each for name, each in table.items() if each is not None}
            table.update({name: new.setdefault(each, _create_empty(each, device)) for name, each in present.items()})
        yield model


def _create_empty(tensor: Tensor, device: str) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _deep_copy(model: nn.Module, device: str) -> nn.Module:
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        memo[id(tensor)] = _create_empty(tensor, device)
    return copy.deepcopy(model, memo)


def _convert_to_meta(state: StateDict) -> StateDict:
    meta: StateDict = tree_map(
        lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, Tensor) else leaf,
        state,
    )
    return meta


def merge_states(full: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``full`` with nested values replaced by those in ``part``."""
    return {
        key: merge_states(child, part[key]) if isinstance(child, Mapping) and key in part else part.get(key, child)
        for key, child in full.items()
    }


@final
@dataclass(frozen=True)
class ShardedOptimizerState(OptimizerState):
    """The state of an optimizer whose parameters are sharded, or updated by different ranks."""

    model: nn.Module
    optimizer: Optimizer
    full: StateDict = field(repr=False)
    """The unsharded optimizer state, see :func:`meta_states`."""
    restricted: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context that restricts the optimizer's groups to this rank's parameters."""

    def state(self) -> StateDict:
        with self.restricted():
            mine = collect_named_state(self.model, self.optimizer)
        groups = [
            {**saved, **_get_options(group)}
            for saved, group in zip(self.full["param_groups"], self.optimizer.param_groups, strict=True)
        ]
        own = {"extra": mine["extra"]} if "extra" in mine else {}  # the same on every rank
        return {**merge_states(self.full, {"state": mine["state"]}), **own, "param_groups": groups}

    def load(self, state: StateDict) -> None:
        with self.restricted():
            mine = collect_named_state(self.model, self.optimizer)
            groups = [
                {**group, "params": own["params"]}
                for group, own in zip(state["param_groups"], mine["param_groups"], strict=True)
            ]
            part: Any = {"state": {name: state["state"][name] for name in mine["state"]}, "param_groups": groups}
            load_named_state(self.model, self.optimizer, {**part, "extra": state.get("extra", {})})
        # torch may drop the options of groups without parameters when it loads them
        for saved, group in zip(state["param_groups"], self.optimizer.param_groups, strict=True):
            group.update(_get_options(saved))


def _get_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}
