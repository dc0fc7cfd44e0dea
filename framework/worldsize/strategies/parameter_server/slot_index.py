"""Index of the slots that the rows of a table have in a server's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, final

import torch
from torch import Tensor

Sharding = Literal["hash", "range"]
_DIRECT = 1 << 27  # rows of a server, up to which there is an array of slots; beyond it a dict


class SlotIndex(ABC):
    """Maps ids of rows (int64 [n]) to slots (int64 [n]); -1 stands for a row that has none."""

    @abstractmethod
    def get(self, ids_n: Tensor) -> Tensor:
        """Look up the slots of rows."""

    @abstractmethod
    def set(self, ids_n: Tensor, slots_n: Tensor) -> None:
        """Give rows these slots; -1 takes a row's slot away."""


@final
class DirectSlotIndex(SlotIndex):
    """Slots in an array with an entry for each row that the server may own.

    Args:
        block: Rows of the table that one server owns, at most.
        shards: Number of servers.
        sharding: How rows are dealt to them.
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
    """Slots in a dict, for tables whose ids are spread over a huge range."""

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
    """Make the index of one of ``shards`` servers for a table of so many rows."""
    block = -(-rows // shards)
    return DirectSlotIndex(block, shards=shards, sharding=sharding) if block <= _DIRECT else HashedSlotIndex()
