"""Intercepts calls of torch by which a constructor could notice that its tensors are fakes."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, linalg, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from worldsize.strategies.deferred.fakes import CannotDeferError, own_attributes

_ADDRESSES = {Tensor.data_ptr, Tensor.__dlpack__, Tensor.numpy, Tensor.__array__}
_BY_CLASS = {  # functions that round differently for tensor subclasses, such as fakes
    *(
        linalg.svdvals,
        linalg.eigvals,
        linalg.eigvalsh,
        linalg.cond,
        linalg.matrix_rank,
        linalg.matrix_norm,
        linalg.norm,
    ),
    torch.nuclear_norm,
}
_NORMS = {torch.norm, Tensor.norm}
_STORAGES = {Tensor.untyped_storage, Tensor.storage}


@final
class CallWatcher(TorchFunctionMode):
    """Makes calls with fakes behave as with ordinary tensors within its context, or refuses them.

    Args:
        do: Calls a function with real tensors in place of fakes.

    Attributes:
        failure: The first error of a call with fakes, which the constructor may have handled.

    Raises:
        CannotDeferError: within the context, at a call that cannot behave the same.
    """

    def __init__(self, do: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self._do = do
        self.failure: Exception | None = None
        own_attributes()  # asked for within the context, it would look at what is made there

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            if func is Tensor.detach:
                _refuse_subclass(sys._getframe(1))
            if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor) and args[0].is_leaf:
                return _copied(args[0], args[1])
            if func in _STORAGES and isinstance(args[0], FakeTensor):
                raise _refusal("a storage")
            if _depends_on_class(func, args, kwargs or {}) and _has_fake((args, kwargs)):
                with _disable_current_modes():
                    return self._do(_with_needs_of(args, kwargs or {}, func), args, kwargs or {})
            return func(*args, **(kwargs or {}))
        except Exception as error:  # any: whatever it is, it may be one that other tensors do not raise
            if not _has_fake((args, kwargs)):
                raise
            failure = _refusal(str(error)) if func in _ADDRESSES else error
            self.failure = self.failure or failure
            raise failure from None


def _has_fake(tree: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(tree))


def _with_needs_of(args: Sequence[Any], kwargs: Mapping[str, Any], func: Any) -> Callable[..., Any]:
    """Return ``func`` for real tensors in place of ``args`` and ``kwargs``, with the same ``requires_grad``."""
    needs = [leaf.requires_grad for leaf in tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor)]

    def call(*numbers: Any, **others: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((numbers, others)) if isinstance(leaf, Tensor)]
        for tensor, need in zip(tensors, needs, strict=True):
            if need and not tensor.requires_grad:
                tensor.requires_grad_()
        return func(*numbers, **others)

    return call


def _depends_on_class(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether ``func`` rounds differently if it is given fakes."""
    return func in _BY_CLASS or (
        func in _NORMS and "nuc" in (leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, str))
    )


def _refusal(detail: str) -> CannotDeferError:
    return CannotDeferError(
        f"its constructor asks where weights lie in memory ({detail})",
        "Let it tell weights apart by id(), and compute with them by torch.",
    )


def _refuse_subclass(caller: FrameType | None) -> None:
    """Raise CannotDeferError if ``caller`` makes a parameter of a subclass, which a fake cannot be."""
    if caller is None or caller.f_code is not nn.Parameter.__new__.__code__:
        return
    if (kind := caller.f_locals["cls"]) is not nn.Parameter:
        raise CannotDeferError(
            f"its constructor makes parameters of the class {kind.__name__}",
            "Let them be of the class nn.Parameter, with attributes of their own.",
        )


def _copied(fake: FakeTensor, memo: dict[int, Any]) -> Tensor:
    """Copy ``fake`` like the tensor that it represents, without checking whether it has memory."""
    if id(fake) in memo:
        copied: Tensor = memo[id(fake)]
        return copied
    with torch.no_grad():
        copied = fake.detach().clone()
    if isinstance(fake, nn.Parameter):
        copied = nn.Parameter(copied, fake.requires_grad)
    else:
        copied.requires_grad_(fake.requires_grad)
        own = {name: value for name, value in vars(fake).items() if name not in own_attributes()}
        vars(copied).update(copy.deepcopy(own, memo))
    memo[id(fake)] = copied
    return copied
