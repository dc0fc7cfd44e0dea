"""A server's memory for the rows of one table."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from worldsize.strategies.parameter_server.slot_index import SlotIndex

_LEAST = 1024  # slots
_EVICTED = 0.1  # fraction of the capacity that is freed at once


@final
class RowStore:
    """Keeps rows in the slots of one tensor, which grows; with a capacity, least recently used rows are evicted.

    Args:
        width: Numbers in a row: its values, then its optimizer's state.
        index: Maps ids of rows to slots; only this store changes it.
        capacity: Largest number of rows; None: no limit.

    Attributes:
        data: float32 (slots, width); replaced by another tensor in :meth:`allocate`.
        evicted: Number of evicted rows.
    """

    def __init__(self, width: int, index: SlotIndex, *, capacity: int | None) -> None:
        self.data = torch.empty(0, width)
        self.index = index
        self.evicted = 0
        self._capacity = capacity
        self._ids = torch.empty(0, dtype=torch.int64)
        self._touched = torch.empty(0, dtype=torch.int64)  # when each slot was touched last
        self._used, self._free = 0, torch.empty(0, dtype=torch.int64)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self._used - len(self._free)

    def touch(self, slots_n: Tensor, now: int) -> None:
        """Record that the rows in ``slots_n`` (n,) were used at the clock ``now``."""
        if self._capacity is not None:
            self._touched.index_fill_(0, slots_n, now)

    def allocate(self, ids_n: Tensor, now: int) -> Tensor:
        """Allocate slots for new rows ``ids_n`` (n,): int64 (n,); the caller fills them in ``data``."""
        if self._capacity is not None and self.count + len(ids_n) > self._capacity:
            self._evict(self.count + len(ids_n) - self._capacity, self._capacity)
        slots_n = self._room(len(ids_n))
        self._ids[slots_n] = ids_n
        self._touched[slots_n] = now
        self.index.set(ids_n, slots_n)
        return slots_n

    def _room(self, count: int) -> Tensor:
        """Return slots (count,) for ``count`` new rows, free ones first."""
        reused, self._free = self._free[:count], self._free[count:]
        first, self._used = self._used, self._used + count - len(reused)
        if self._used > len(self.data):
            more = max(2 * len(self.data), self._used, _LEAST) - len(self.data)
            self.data = torch.cat([self.data, torch.empty(more, self.data.shape[1])])
            unset = torch.empty(more, dtype=torch.int64)
            self._ids, self._touched = torch.cat([self._ids, unset]), torch.cat([self._touched, unset])
        return torch.cat([reused, torch.arange(first, self._used)])

    def _evict(self, least: int, capacity: int) -> None:
        """Evict the least recently used rows, ``least`` or more of them."""
        live_n = self._live()
        count = min(len(live_n), max(least, int(capacity * _EVICTED)))
        gone_n = live_n[self._touched[live_n].topk(count, largest=False).indices]
        self.index.set(self._ids[gone_n], torch.full((count,), -1))
        self._free = torch.cat([self._free, gone_n])
        self.evicted += count

    def _live(self) -> Tensor:
        live_n = torch.ones(self._used, dtype=torch.bool)
        live_n[self._free] = False
        return live_n.nonzero().flatten()

    def by_id(self) -> tuple[Tensor, Tensor]:
        """Return copies of all ids and rows, ordered by id: int64 (n,) and float32 (n, width)."""
        live_n = self._live()
        order_n = live_n[self._ids[live_n].argsort()]
        return self._ids[order_n].clone(), self.data[order_n].clone()
