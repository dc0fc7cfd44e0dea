"""The fakes that stand for tensors while a constructor runs: tensors without memory that say they are on the CPU."""

from __future__ import annotations

from collections.abc import Collection
from typing import final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from worldsize.strategies.deferred.tape import Deferred, Storage


class CannotDeferError(Exception):
    """The constructor does something that cannot be put off."""


@final
class FakeStorages:
    """Numbers the storages of fakes, which tensors that share memory share too."""

    def __init__(self) -> None:
        self._numbers: dict[int, Storage] = {}  # by address
        self._storages: list[torch.UntypedStorage] = []  # else another one might get the address of one that is gone

    def describe(self, tensor: Tensor) -> Deferred | None:
        """Return ``tensor`` as the tape has it; None: its numbers are there."""
        if tensor.layout is not torch.strided:  # a sparse one has no storage, and is never deferred
            return None
        storage = self._numbers.get(tensor.untyped_storage()._cdata)
        if storage is None:
            return None
        return Deferred(storage, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def add(self, tensor: Tensor) -> int | None:
        """Number the storage of ``tensor``; return its length in bytes, or None if it has a number.

        Raises:
            CannotDeferError: it is not on the CPU, or sparse.
        """
        if tensor.layout is not torch.strided:
            raise CannotDeferError("its constructor makes a sparse tensor of weights")
        if tensor.device.type != "cpu":
            raise CannotDeferError(f"its constructor makes weights on {tensor.device}")
        storage = tensor.untyped_storage()
        if storage._cdata in self._numbers:
            return None
        self._numbers[storage._cdata] = len(self._storages)
        self._storages.append(storage)
        return storage.nbytes()

    def are_in_use(self) -> bool:
        """Tell whether there is still a tensor with one of these storages."""
        return any(torch._C._storage_Use_Count(storage._cdata) > 1 for storage in self._storages)


def with_numbers(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or an ordinary tensor in its memory if it was a fake whose ``data`` has been set to one."""
    if (
        not isinstance(tensor, FakeTensor)
        or tensor.layout is not torch.strided
        or tensor.untyped_storage().device.type == "meta"
    ):
        return tensor
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(tensor.untyped_storage(), int(tensor.storage_offset()), tensor.size(), tensor.stride())


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes of the numbers that ``tensor`` holds; of a sparse one, those that are not zero."""
    held = tensor.numel() if tensor.layout is torch.strided else tensor._nnz()
    return held * tensor.element_size()


def is_whole(tensor: Tensor) -> bool:
    """Tell whether ``tensor`` is all of its storage."""
    return tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()


def own_attributes(fake: Tensor) -> Collection[str]:
    """Return the names of the attributes that ``fake`` has because it is one; the others are the constructor's."""
    if not isinstance(fake, FakeTensor):
        return ()
    return {*vars(fake.fake_mode.from_tensor(torch.empty(0))), "_is_param", "_is_buffer"}
