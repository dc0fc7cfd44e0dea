"""The places of tensors in a model's modules, and how tensors are put there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from worldsize.collectives.per_rank import sharded_like

Table: TypeAlias = Literal["_parameters", "_buffers", "__dict__"]
_TABLES: tuple[Table, ...] = ("_parameters", "_buffers", "__dict__")


@final
@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a module, which stays the same when the module is sharded."""

    module: nn.Module
    name: str
    table: Table

    @property
    def tensor(self) -> Tensor:
        """The tensor that is in this place, of any shape."""
        tensor: Tensor = getattr(self.module, self.table)[self.name]
        return tensor

    @property
    def moves(self) -> bool:
        """Whether the tensor moves with its module to another device."""
        return self.table != "__dict__"

    def set(self, tensor: Tensor) -> None:
        """Put ``tensor``, of the same shape, in this place; a parameter or buffer is set through its module."""
        if self.table == "__dict__":
            vars(self.module)[self.name] = tensor  # a parameter that is kept there is not the module's
        else:
            setattr(self.module, self.name, tensor)


@final
@dataclass(frozen=True)
class Devices:
    """The devices on which this process keeps the tensors of its modules; other tensors stay on the host."""

    full: torch.device
    shards: torch.device

    def put(self, made: Tensor, slots: Sequence[Slot]) -> None:
        """Put this process's part of ``made``, in full shape, in place of the tensor that is in all of ``slots``."""
        empty = slots[0].tensor
        if isinstance(empty, DTensor):
            part: Tensor = _part(empty, made, self.shards)
        else:  # what is neither parameter nor buffer stays on the host, as it does when a module moves
            part = made.to(self.full) if any(slot.moves for slot in slots) else made
            part = part.detach()  # another tensor, since others may be made of this memory
        part = like(empty, part)
        try:
            torch.utils.swap_tensors(empty, part)  # type: ignore[no-untyped-call] # whoever else has it has it made
        except RuntimeError:  # something refers to it weakly, as torch's LSTM does, which notes what is set
            for slot in slots:
                slot.set(part)


def slots_of(model: nn.Module) -> Iterator[Slot]:
    """Iterate over the places of all tensors that are attributes of modules."""
    for module in model.modules():
        for table in _TABLES:
            entries: dict[str, Any] = getattr(module, table)
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    yield Slot(module, name, table)


def like(tensor: Tensor, numbers: Tensor, *, leave_out: frozenset[str] = frozenset()) -> Tensor:
    """Return ``numbers``, of the same shape, as a copy of ``tensor``: a parameter if it is one, with its attributes.

    Attributes named in ``leave_out`` are not copied.
    """
    if isinstance(tensor, nn.Parameter):
        numbers = nn.Parameter(numbers, tensor.requires_grad)
    elif tensor.requires_grad:
        numbers.requires_grad_()
    vars(numbers).update({name: value for name, value in vars(tensor).items() if name not in leave_out})
    return numbers


def _part(empty: DTensor, full: Tensor, device: torch.device) -> DTensor:
    size, begin = compute_local_shape_and_global_offset(full.shape, empty.device_mesh, empty.placements)
    box = tuple(slice(first, first + length) for first, length in zip(begin, size, strict=True))
    local = full[box].to(device, copy=True, memory_format=torch.contiguous_format)
    return sharded_like(empty, local)
