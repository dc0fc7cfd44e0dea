"""Index of the slots of a table's rows in a server's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

import torch
from torch import Tensor

Sharding = Literal["hash", "range"]
_DIRECT = 1 << 27  # largest number of rows of a server for an array of slots; a dict is used beyond it


class SlotIndex(ABC):
    """Maps ids of rows, int64 (n,), to slots, int64 (n,); -1 means that a row has no slot."""

    @abstractmethod
    def get(self, ids_n: Tensor) -> Tensor:
        """Return the slots of rows ``ids_n``: int64 (n,)."""

    @abstractmethod
    def set(self, ids_n: Tensor, slots_n: Tensor) -> None:
        """Assign slots (n,) to rows ``ids_n`` (n,); -1 removes a row's slot."""


@final
class DirectSlotIndex(SlotIndex):
    """Slots in an array with an entry for each row that the server may own.

    Args:
        block: Largest number of rows of the table that one server owns.
        shards: Number of servers.
        sharding: How rows are assigned to servers.
    """

    def __init__(self, block: int, *, shards: int, sharding: Sharding) -> None:
        self._block, self._shards, self._sharding = block, shards, sharding
        self._slots = torch.full((block,), -1, dtype=torch.int64)

    def _local(self, ids_n: Tensor) -> Tensor:
        if self._shards == 1:
            return ids_n
        return ids_n // self._shards if self._sharding == "hash" else ids_n % self._block

    def get(self, ids_n: Tensor) -> Tensor:
        return self._slots.index_select(0, self._local(ids_n))

    def set(self, ids_n: Tensor, slots_n: Tensor) -> None:
        self._slots[self._local(ids_n)] = slots_n


@final
class HashedSlotIndex(SlotIndex):
    """Slots in a dict, for tables whose ids cover a huge range."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}

    def get(self, ids_n: Tensor) -> Tensor:
        return torch.tensor([self._slots.get(row, -1) for row in ids_n.tolist()], dtype=torch.int64)

    def set(self, ids_n: Tensor, slots_n: Tensor) -> None:
        for row, slot in zip(ids_n.tolist(), slots_n.tolist(), strict=True):
            if slot < 0:
                self._slots.pop(row, None)
            else:
                self._slots[row] = slot


def slot_index(rows: int, *, shards: int, sharding: Sharding) -> SlotIndex:
    """Make the index of one of ``shards`` servers for a table of ``rows`` rows."""
    block = -(-rows // shards)
    return DirectSlotIndex(block, shards=shards, sharding=sharding) if block <= _DIRECT else HashedSlotIndex()
