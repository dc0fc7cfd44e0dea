"""The memory of a server for the rows of one table."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from worldsize.strategies.parameter_server.slot_index import SlotIndex

_LEAST = 1024  # slots
_EVICTED = 0.1  # share of the capacity that is freed at once


@final
class RowStore:
    """Keeps rows in the slots of one tensor, which grows; if a capacity is set, rows not touched for longest leave.

    Args:
        width: The numbers of a row: its values, then its optimizer's state.
        index: Maps ids of rows to slots; this store alone changes it.
        capacity: The number of rows that are kept; None: all.

    Attributes:
        data: float32 [slots, width]; another tensor after :meth:`allocate`.
        evicted: The number of rows that have left.
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
        """The number of rows."""
        return self._used - len(self._free)

    def touch(self, slots_n: Tensor, now: int) -> None:
        """Note that the rows in these slots were used at ``now``."""
        if self._capacity is not None:
            self._touched.index_fill_(0, slots_n, now)

    def allocate(self, ids_n: Tensor, now: int) -> Tensor:
        """Give new rows slots, int64 [n], whose numbers in ``data`` are for the caller to fill."""
        if self._capacity is not None and self.count + len(ids_n) > self._capacity:
            self._evict(self.count + len(ids_n) - self._capacity, self._capacity)
        slots_n = self._room(len(ids_n))
        self._ids[slots_n] = ids_n
        self._touched[slots_n] = now
        self.index.set(ids_n, slots_n)
        return slots_n

    def _room(self, count: int) -> Tensor:
        """Find slots for ``count`` new rows, free ones first."""
        reused, self._free = self._free[:count], self._free[count:]
        first, self._used = self._used, self._used + count - len(reused)
        if self._used > len(self.data):
            more = max(2 * len(self.data), self._used, _LEAST) - len(self.data)
            self.data = torch.cat([self.data, torch.empty(more, self.data.shape[1])])
            unset = torch.empty(more, dtype=torch.int64)
            self._ids, self._touched = torch.cat([self._ids, unset]), torch.cat([self._touched, unset])
        return torch.cat([reused, torch.arange(first, self._used)])

    def _evict(self, least: int, capacity: int) -> None:
        """Forget the rows that have not been touched for longest, ``least`` or more of them."""
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
        """Copy all rows, ordered by id: int64 [n] and float32 [n, width]."""
        live_n = self._live()
        order_n = live_n[self._ids[live_n].argsort()]
        return self._ids[order_n].clone(), self.data[order_n].clone()
