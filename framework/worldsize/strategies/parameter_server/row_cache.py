"""A worker's cache of pulled rows, which it may read again while they are recent enough."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


@final
class RowCache:
    """A direct-mapped cache: each row has one possible slot of ``capacity``, and the next row with that slot evicts it.

    A row has a clock: the last step whose updates it includes completely. A read that needs updates up to a step is
    served from the cache if the row's clock is at least that step (Ho et al. 2013, section 3).
    """

    def __init__(self, capacity: int, dim: int) -> None:
        self._rows = torch.empty(capacity, dim)
        self._ids = torch.full((capacity,), -1, dtype=torch.int64)
        self._clocks = torch.empty(capacity, dtype=torch.int64)
        self.read = self.missed = 0

    def get(self, ids_n: Tensor, clock: int) -> tuple[Tensor, Tensor]:
        """Read rows ``ids_n``: float32 (n, dim), and bool (n,) for rows missing or without all updates to ``clock``."""
        slots_n = ids_n % len(self._ids)
        missing_n = (self._ids[slots_n] != ids_n) | (self._clocks[slots_n] < clock)
        self.read += len(ids_n)
        self.missed += int(missing_n.sum())
        return self._rows[slots_n], missing_n

    def put(self, ids_n: Tensor, rows_nd: Tensor, clock: int) -> None:
        """Store rows (n, dim) that include all updates up to ``clock``; ``ids_n`` (n,) are unique."""
        slots_n = ids_n % len(self._ids)
        self._ids[slots_n] = ids_n
        kept_n = self._ids[slots_n] == ids_n  # of several rows with the same slot, one is stored
        self._rows[slots_n[kept_n]] = rows_nd[kept_n]
        self._clocks[slots_n] = clock
