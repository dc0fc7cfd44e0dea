"""Rows that a worker has pulled, for as long as it may read them again."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor


@final
class RowCache:
    """Direct-mapped: a row has one of ``capacity`` places, which it leaves to the next that wants it.

    A row has the clock of its server when it was pulled: the last step all of whose updates it has seen. A read that
    needs those up to a step is served if the row's clock is not before it (Ho et al. 2013, section 3).
    """

    def __init__(self, capacity: int, dim: int) -> None:
        self._rows = torch.empty(capacity, dim)
        self._ids = torch.full((capacity,), -1, dtype=torch.int64)
        self._clocks = torch.empty(capacity, dtype=torch.int64)
        self.read = self.missed = 0

    def get(self, ids_n: Tensor, clock: int) -> tuple[Tensor, Tensor]:
        """float32 [n, dim] and bool [n]: which of them are missing, or have not seen all updates up to ``clock``."""
        places_n = ids_n % len(self._ids)
        missing_n = (self._ids[places_n] != ids_n) | (self._clocks[places_n] < clock)
        self.read += len(ids_n)
        self.missed += int(missing_n.sum())
        return self._rows[places_n], missing_n

    def put(self, ids_n: Tensor, rows_nd: Tensor, clock: int) -> None:
        """``ids_n``: each once."""
        places_n = ids_n % len(self._ids)
        self._ids[places_n] = ids_n
        kept_n = self._ids[places_n] == ids_n  # of several that want one place, one has it
        self._rows[places_n[kept_n]] = rows_nd[kept_n]
        self._clocks[places_n] = clock
