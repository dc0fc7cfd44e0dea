"""Checks that losses do not change parameters or communicate, for consistent results.

The checks do not change any computation: they read the version counters of tensors, and intercept a function that
every collective of torch's Python API calls first. Version counters miss writes through ``parameter.data``; these are
detected only in a process's first step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, final

import torch.distributed._functional_collectives as funcol
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from worldsize.core import ConfigError

_PASSED_ON = (  # modules to skip when looking for the caller of a collective
    __name__,  # _DataUses calls torch functions again
    "torch.overrides",
    c10d.__name__,
    funcol.__name__,
    "torch.distributed.c10d_logger",
    "torch.distributed.nn",
    "torch.autograd",
    "torch.utils",
    "worldsize.collectives.group",
)
_T = TypeVar("_T")
_RESOLVES = ("_resolve_group", "_resolve_group_name")  # name depends on the torch release
# packages whose collectives are not the user's; torch._ because its compiler logs the rank
_OWN = ("torch.distributed.", "torch.nn.parallel.", "torch._", "worldsize.")
_PROGRAMS = "worldsize.testing."  # exception: recipes for tests


@final
class LossWatch:
    """Detects losses that change parameters of ``model`` or communicate.

    Args:
        model: The model, which provides parameter names.
        processes: Number of processes that train it together.
        logical_ranks: Number of logical ranks per step.
        ordered: Whether results must not depend on the number of processes.
        compiles: Whether parts of the model are compiled; writes through ``parameter.data`` are then missed.
        has_group: Whether the processes form a group, so that a loss could communicate.
        passes_over: Number of processes that compute each logical rank's pass together.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        processes: int,
        logical_ranks: int,
        ordered: bool,
        compiles: bool = False,
        has_group: bool = True,
        passes_over: int = 1,
    ) -> None:
        self._model, self._root, self._processes, self._passes_over = model, model, processes, passes_over
        self._is_plain = processes == 1 and logical_ranks == 1  # equivalent to a plain loop
        self._may_communicate = has_group and not ordered and logical_ranks in (1, processes) and passes_over == 1
        self._ordered, self._has_group = ordered, has_group
        self._data = None if compiles else _DataUses(model)  # only in the first step
        self._held: Sequence[tuple[str, Callable[[], Tensor | None]]] | None = None

    def watch_root(self, root: nn.Module) -> None:
        """Also watch parameters gathered by ``root``, a module around the model."""
        self._root = root

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch a step's passes, up to the update.

        Raises:
            ConfigError: a loss changed a parameter or communicated.
        """
        if self._is_plain:
            yield
            return
        if self._held is None:
            self._held = list(_iterate_parameters(self._model, self._root, skips_bounded=self._processes == 1))
        before = [_read_version(find()) for _, find in self._held]
        with self._no_collectives(), self._data or nullcontext():
            yield
        for (name, find), count in zip(self._held, before, strict=True):
            if count is not None and _read_version(find()) != count:
                raise self._build_change_error(name)
        for name in self._data.find_written_names() if self._data else ():
            raise self._build_change_error(name)

    def end_step(self) -> None:
        """End a step; writes through ``parameter.data`` are checked only in the first one."""
        self._data = None

    def run_reducer(self, run: Callable[[], _T]) -> _T:
        """Call ``run`` of the strategy's reducer, which may use collectives."""
        return run()

    def _build_change_error(self, name: str) -> ConfigError:
        module, _, own = name.rpartition(".")
        embedding = self._model.get_submodule(module)
        if own == "weight" and getattr(embedding, "max_norm", None) is not None:
            return build_max_norm_error(module)
        return ConfigError(
            f"the loss modifies the parameter {name}. All logical ranks of a step use the same weights, so the change "
            "would be lost or differ between ranks. Change the parameter in place in a hook of the optimizer "
            "(optimizer.register_step_post_hook), which runs once per step, or set ema.decay to average all weights."
        )

    @contextmanager
    def _no_collectives(self) -> Iterator[None]:
        """Refuse collectives of user code within the context, unless the loss may communicate.

        With ordered sums, a single process also detects collectives that the loss would skip without other processes:
        a group then appears to exist, and queries of its size are refused.
        """
        if self._may_communicate or (self._processes == 1 and not self._ordered):
            yield
            return
        names = [(c10d, "_rank_not_in_group"), *((funcol, name) for name in _RESOLVES if hasattr(funcol, name))]
        watched = [(module, name, partial(self._check_and_call, getattr(module, name))) for module, name in names]
        changes: list[tuple[Any, str, Any]] = [*watched]
        if self._processes == 1:
            changes.append((c10d, "GroupMember", _Initialized))
        replaced = [(module, name, getattr(module, name)) for module, name, _ in changes]
        for module, name, value in changes:
            setattr(module, name, value)
        try:
            yield
        finally:
            for module, name, value in replaced:
                setattr(module, name, value)

    def _check_and_call(self, function: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Call ``function``, the first step of a collective in torch; refuse calls by user code."""
        self._check_caller()
        return function(*args, **kwargs)

    def _check_caller(self) -> None:
        if caller := _program_calls(sys._getframe(2)):
            raise self._communicates(caller)

    def _communicates(self, caller: str) -> ConfigError:
        if not self._has_group:
            return ConfigError(
                f"the loss calls a collective in {caller}, but this strategy has no process group. Compute the value "
                "within a logical rank, or use strategy=ddp with reproducibility=seeded and logical_ranks set to the "
                "number of processes."
            )
        if self._passes_over > 1:
            return ConfigError(
                f"the loss calls a collective in {caller}, but {self._passes_over} processes compute each pass "
                "together on the same samples. Compute the value within a logical rank, or use strategy=ddp or fsdp "
                "with reproducibility=seeded and logical_ranks set to the number of processes."
            )
        because = (
            "with reproducibility=elastic its result would depend on the number of processes"
            if self._ordered
            else "a step has more logical ranks than processes, so its result would cover only some of them"
        )
        remedy = "reproducibility=seeded and " if self._ordered else ""
        return ConfigError(
            f"the loss calls a collective in {caller}, but {because}. Compute the value within a logical rank, derive "
            f"the recipe from FeatureRecipe for the features of all logical ranks, or set {remedy}logical_ranks to the "
            "number of processes."
        )


def build_max_norm_error(name: str) -> ConfigError:
    """Return the error for embedding ``name`` with ``max_norm`` that several processes train."""
    return ConfigError(
        f"max_norm of {name or 'the model'} is not supported with several processes: the forward pass renormalizes "
        "only the rows of the local batch. Remove max_norm and renormalize the weight in place in a hook of the "
        "optimizer, such as weight.copy_(weight.renorm(2, 0, max_norm)) under torch.no_grad(), or use "
        "strategy=single."
    )


def find_bounded_embeddings(model: nn.Module) -> Mapping[str, nn.Module]:
    """Return the embeddings of ``model`` with ``max_norm``, keyed by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    }


def _iterate_parameters(
    model: nn.Module, root: nn.Module, *, skips_bounded: bool
) -> Iterator[tuple[str, Callable[[], Tensor | None]]]:
    """Yield parameter names with a function that returns the tensor, None if not gathered."""
    bounded = {id(module.weight) for module in find_bounded_embeddings(model).values()} if skips_bounded else set()
    places: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in bounded or not parameter.numel():
            continue
        places[id(parameter)] = name
        yield name, lambda parameter=parameter: parameter  # type: ignore[misc]
    for module in root.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for each in group.fsdp_params:
                    if name := places.get(id(each.sharded_param), ""):
                        yield name, lambda each=each: getattr(each, "_unsharded_param", None)  # type: ignore[misc]


def _read_version(tensor: Tensor | None) -> tuple[int, int] | None:
    """Return a tensor's version counter and storage address, or None if it does not exist yet."""
    if tensor is None:
        return None
    return tensor._version, 0 if isinstance(tensor, DTensor) else tensor.untyped_storage()._cdata


def _program_calls(frame: Any) -> str:
    """Return the user function that called a collective, or "" if the strategy called it."""
    caller = ""
    while frame is not None:
        if frame.f_code is LossWatch.run_reducer.__code__:
            return ""
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_OWN) and not name.startswith((*_PASSED_ON, _PROGRAMS)):
            return caller
        if not caller and not name.startswith(_PASSED_ON):
            caller = f"{frame.f_code.co_qualname} of {name}"
        frame = frame.f_back
    return caller


class _InitializedMeta(type(c10d.GroupMember)):  # type: ignore[misc]
    """Makes ``dist.is_initialized`` return True to user code, even without a group."""

    @property
    def WORLD(cls) -> Any:  # noqa: N802 - torch's name
        frame = sys._getframe(1)
        asks = frame.f_code is c10d.is_initialized.__code__ and _program_calls(frame)
        return c10d._world.default_pg or (True if asks else None)


class _Initialized(c10d.GroupMember, metaclass=_InitializedMeta):
    """Replaces torch's class while a single process computes a loss."""


@final
class _DataUses(TorchFunctionMode):
    """Records the results of ``parameter.data``, to detect writes to them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._uses: list[tuple[str, Tensor | None]] = []  # names and returned tensors, None if data was assigned

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        if getattr(func, "__self__", None) is _DATA and isinstance(args[0], nn.Parameter):
            names = [name for name, parameter in self._model.named_parameters() if parameter is args[0]]
            self._uses += [(name, returned) for name in names]
        return returned

    def find_written_names(self) -> Iterator[str]:
        """Yield the names of parameters whose ``.data`` was assigned or modified in place."""
        for name, data in self._uses:
            if data is None or data._version > 0:
                yield name


_DATA = Tensor.data
