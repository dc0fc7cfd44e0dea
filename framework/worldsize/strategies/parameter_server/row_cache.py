"""Rows that a worker has pulled, for as long as it may read them again."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


@final
class RowCache:
    """A direct-mapped cache: a row has one of ``capacity`` slots, which it leaves to the next row that wants it.

    A row has the clock of its server when it was pulled: the last step all of whose updates it has seen. A read that
    needs those up to a step is served if the row's clock is not before it (Ho et al. 2013, section 3).
    """

    def __init__(self, capacity: int, dim: int) -> None:
        self._rows = torch.empty(capacity, dim)
        self._ids = torch.full((capacity,), -1, dtype=torch.int64)
        self._clocks = torch.empty(capacity, dtype=torch.int64)
        self.read = self.missed = 0

    def get(self, ids_n: Tensor, clock: int) -> tuple[Tensor, Tensor]:
        """Read rows: float32 [n, dim], and bool [n] for those missing or without all updates up to ``clock``."""
        slots_n = ids_n % len(self._ids)
        missing_n = (self._ids[slots_n] != ids_n) | (self._clocks[slots_n] < clock)
        self.read += len(ids_n)
        self.missed += int(missing_n.sum())
        return self._rows[slots_n], missing_n

    def put(self, ids_n: Tensor, rows_nd: Tensor, clock: int) -> None:
        """Keep rows that have seen all updates up to ``clock``; ``ids_n`` has each once."""
        slots_n = ids_n % len(self._ids)
        self._ids[slots_n] = ids_n
        kept_n = self._ids[slots_n] == ids_n  # of several that want one slot, one has it
        self._rows[slots_n[kept_n]] = rows_nd[kept_n]
        self._clocks[slots_n] = clock
