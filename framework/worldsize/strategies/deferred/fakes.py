"""Fake tensors for running a constructor.

They have no memory, and report the CPU as their device. Torch calls whose results would differ for fakes are
intercepted.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor, linalg, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from worldsize.strategies.deferred.tape import Deferred, Storage


class CannotDeferError(Exception):
    """The constructor does something that cannot be deferred.

    Attributes:
        remedy: How to fix the constructor, as a complete sentence.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


@final
class HostFakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Creates fake tensors on the host.

    Torch's own mode also registers a GPU on hosts without one. Autograd would then keep a thread for it, and the
    process could not fork others that use autograd.
    """

    @property
    def avoid_device_init(self) -> bool:
        return False


@final
class FakeStorages:
    """Assigns an index to each storage of fakes; tensors that share memory have the same index."""

    def __init__(self) -> None:
        self._numbers: dict[int, Storage] = {}  # by address
        self._storages: list[torch.UntypedStorage] = []  # kept alive, so that no address is reused

    def describe(self, tensor: Tensor) -> Deferred | None:
        """Describe ``tensor``, of any shape, for the tape; return None if it already has values."""
        if tensor.layout is not torch.strided:  # sparse tensors lack a storage and are never deferred
            return None
        storage = self._numbers.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return None
        return _laid_out(tensor, storage)

    def register_storage(self, tensor: Tensor) -> int | None:
        """Register the storage of ``tensor``; return its size in bytes, or None if already known.

        Raises:
            CannotDeferError: the tensor is not on the CPU, or sparse.
        """
        if tensor.layout is not torch.strided:
            raise CannotDeferError(
                "the constructor creates a sparse weight tensor",
                "Create it from separate tensors, such as its indices.",
            )
        if tensor.device.type != "cpu":
            raise CannotDeferError(
                f"the constructor creates weights on {tensor.device}",
                "Create weights on the CPU; each process moves its shard to the device.",
            )
        storage = tensor.untyped_storage()
        if storage._cdata in self._numbers:
            return None
        self._numbers[storage._cdata] = len(self._storages)
        self._storages.append(storage)
        return storage.nbytes()

    def find_used_storages(self) -> list[torch.UntypedStorage]:
        """Return the storages that tensors still refer to."""
        return [storage for storage in self._storages if torch._C._storage_Use_Count(storage._cdata) > 1]


def unwrap_fake(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or for a fake with assigned ``data``, an ordinary tensor of its shape."""
    if (
        not isinstance(tensor, FakeTensor)
        or tensor.layout is not torch.strided
        or tensor.untyped_storage().device.type == "meta"
    ):
        return tensor
    return _laid_out(tensor, 0).view_storage(tensor.untyped_storage())


def _laid_out(tensor: Tensor, storage: Storage) -> Deferred:
    """Describe the layout of ``tensor`` in ``storage``."""
    return Deferred(
        storage,
        tensor.size(),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        is_conj=tensor.is_conj(),
        is_neg=tensor.is_neg(),
    )


def count_bytes(tensor: Tensor) -> int:
    """Return the size of ``tensor``, of any shape, in bytes; if sparse, of its stored values."""
    held = tensor.numel() if tensor.layout is torch.strided else tensor._nnz()
    return held * tensor.element_size()


def is_whole(tensor: Tensor) -> bool:
    """Return whether ``tensor``, of any shape, covers all of its storage."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


@cache
def own_attributes() -> frozenset[str]:
    """Return the attribute names of every fake; others were set by the constructor."""
    with unset_fake_temporarily():
        fake = HostFakes().from_tensor(torch.empty(0))
    return frozenset({*vars(fake), "_is_param"})


_ADDRESSES = {Tensor.data_ptr, Tensor.__dlpack__, Tensor.numpy, Tensor.__array__}
_BY_CLASS = {  # these round differently for tensor subclasses, such as fakes
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
    """Makes torch calls with fakes behave as with ordinary tensors, or refuses them.

    Args:
        do: Calls a function with real tensors in place of fakes.

    Attributes:
        failure: The first error in a call with fakes; the constructor may have caught it.

    Raises:
        CannotDeferError: within the context, for a call that would behave differently.
    """

    def __init__(self, do: Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self._do = do
        self.failure: Exception | None = None
        own_attributes()  # cached here, since within the context it would see other tensors

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        try:
            if func is Tensor.detach:
                _refuse_subclass(sys._getframe(1))
            if func is Tensor.__deepcopy__ and isinstance(args[0], FakeTensor) and args[0].is_leaf:
                return _deep_copy_fake(args[0], args[1])
            if func in _STORAGES and isinstance(args[0], FakeTensor):
                raise _build_address_error("a storage")
            if _depends_on_class(func, args, kwargs or {}) and _has_fake((args, kwargs)):
                with _disable_current_modes():
                    return self._do(_wrap_with_grad_needs(args, kwargs or {}, func), args, kwargs or {})
            return func(*args, **(kwargs or {}))
        except Exception as error:  # any exception: ordinary tensors might not raise it
            if not _has_fake((args, kwargs)):
                raise
            failure = _build_address_error(str(error)) if func in _ADDRESSES else error
            self.failure = self.failure or failure
            raise failure from None


def _has_fake(tree: Any) -> bool:
    return any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(tree))


def _wrap_with_grad_needs(args: Sequence[Any], kwargs: Mapping[str, Any], func: Any) -> Callable[..., Any]:
    """Wrap ``func`` to give real arguments the ``requires_grad`` of the fakes they replace."""
    needs = [leaf.requires_grad for leaf in tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor)]

    def call_with_grad(*numbers: Any, **others: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((numbers, others)) if isinstance(leaf, Tensor)]
        for tensor, need in zip(tensors, needs, strict=True):
            if need and not tensor.requires_grad:
                tensor.requires_grad_()
        return func(*numbers, **others)

    return call_with_grad


def _depends_on_class(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether ``func`` rounds differently with fakes."""
    return func in _BY_CLASS or (
        func in _NORMS and "nuc" in (leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, str))
    )


def _build_address_error(detail: str) -> CannotDeferError:
    return CannotDeferError(
        f"the constructor reads memory addresses of weights ({detail})",
        "Compare weights by id(), and compute with torch operations.",
    )


def _refuse_subclass(caller: FrameType | None) -> None:
    """Raise CannotDeferError if ``caller`` creates a parameter of a custom subclass."""
    if caller is None or caller.f_code is not nn.Parameter.__new__.__code__:
        return
    if (kind := caller.f_locals["cls"]) is not nn.Parameter:
        raise CannotDeferError(
            f"the constructor creates parameters of class {kind.__name__}",
            "Use nn.Parameter, with additional attributes if needed.",
        )


def _deep_copy_fake(fake: FakeTensor, memo: dict[int, Any]) -> Tensor:
    """Deep-copy ``fake`` like the tensor it represents, without torch's check for memory."""
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
