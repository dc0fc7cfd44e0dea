"""Fake tensors that represent tensors while a constructor runs: they have no memory, and claim to be on the CPU."""

from __future__ import annotations

from functools import cache
from typing import final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from worldsize.strategies.deferred.tape import Deferred, Storage


class CannotDeferError(Exception):
    """The constructor does something that cannot be deferred.

    Attributes:
        remedy: How to change the constructor, as a complete sentence.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


@final
class HostFakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes fakes of tensors on the host.

    Torch's own mode also registers a GPU on hosts without one. Autograd would then keep a thread for it, and a process
    with such a thread cannot fork others that use autograd.
    """

    @property
    def avoid_device_init(self) -> bool:
        return False


@final
class FakeStorages:
    """Numbers the storages of fakes; tensors that share memory have the same number."""

    def __init__(self) -> None:
        self._numbers: dict[int, Storage] = {}  # by address
        self._storages: list[torch.UntypedStorage] = []  # else another one might get the address of one that is gone

    def describe(self, tensor: Tensor) -> Deferred | None:
        """Return the description of ``tensor``, of any shape, for the tape; None: its values exist already."""
        if tensor.layout is not torch.strided:  # a sparse one has no storage, and is never deferred
            return None
        storage = self._numbers.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return None
        return _laid_out(tensor, storage)

    def add(self, tensor: Tensor) -> int | None:
        """Number the storage of ``tensor``, of any shape; return its length in bytes, or None if it has a number.

        Raises:
            CannotDeferError: the tensor is not on the CPU, or sparse.
        """
        if tensor.layout is not torch.strided:
            raise CannotDeferError(
                "its constructor makes a sparse tensor of weights",
                "Make it of tensors of its own, such as its indices.",
            )
        if tensor.device.type != "cpu":
            raise CannotDeferError(
                f"its constructor makes weights on {tensor.device}",
                "Make them on the CPU; each process moves its part.",
            )
        storage = tensor.untyped_storage()
        if storage._cdata in self._numbers:
            return None
        self._numbers[storage._cdata] = len(self._storages)
        self._storages.append(storage)
        return storage.nbytes()

    def in_use(self) -> list[torch.UntypedStorage]:
        """Return the storages that still have tensors."""
        return [storage for storage in self._storages if torch._C._storage_Use_Count(storage._cdata) > 1]


def with_numbers(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or if it is a fake whose ``data`` was set, an ordinary tensor of that memory and shape."""
    if (
        not isinstance(tensor, FakeTensor)
        or tensor.layout is not torch.strided
        or tensor.untyped_storage().device.type == "meta"
    ):
        return tensor
    return _laid_out(tensor, 0).on(tensor.untyped_storage())


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


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the values of ``tensor``, of any shape; for a sparse tensor, those of its stored values."""
    held = tensor.numel() if tensor.layout is torch.strided else tensor._nnz()
    return held * tensor.element_size()


def is_whole(tensor: Tensor) -> bool:
    """Return whether ``tensor``, of any shape, covers all of its storage."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


@cache
def own_attributes() -> frozenset[str]:
    """Return the names of attributes that every fake has; the constructor has set all others."""
    with unset_fake_temporarily():
        fake = HostFakes().from_tensor(torch.empty(0))
    return frozenset({*vars(fake), "_is_param"})
