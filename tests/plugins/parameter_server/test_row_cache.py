"""Cached rows are never staler than the bound, and match the request."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from plugins.parameter_server.remote_embedding import RowCache
from plugins.parameter_server.strategy import ParameterServer
from worldsize.core import ConfigError

DIM = 3


def pulled(ids_n: Tensor, clock: int) -> Tensor:
    """Return rows that contain their ids and the clock of the pull."""
    return torch.stack([ids_n, torch.full_like(ids_n, clock), ids_n], dim=1).float()


@pytest.mark.parametrize("capacity", [1, 7, 64, 1000])
def test_a_read_is_never_staler_than_the_bound(capacity: int) -> None:
    dice, cache, reads = random.Random(capacity), RowCache(capacity, DIM), 0
    for step in range(1, 200):
        staleness, clock = 4, step - 1 - dice.randrange(5)  # the server's clock stays within the bound
        ids_n = torch.tensor(sorted(dice.sample(range(500), dice.randrange(1, 60))))
        oldest = max(0, step - 1 - staleness)
        rows_nd, missing_n = cache.get(ids_n, oldest)
        cached_nd = rows_nd[~missing_n]
        assert (cached_nd[:, 0] == ids_n[~missing_n]).all()
        assert (cached_nd[:, 2] == ids_n[~missing_n]).all()
        assert (cached_nd[:, 1] >= oldest).all()
        reads += len(cached_nd)
        cache.put(ids_n[missing_n], pulled(ids_n[missing_n], clock), clock)
    assert reads == cache.read - cache.missed > 0


def test_rows_are_cached_only_where_reads_may_be_stale() -> None:
    assert ParameterServer(consistency="bounded", staleness=2, cache_rows=10).cache_rows == 10
    for consistency in ("sync", "bounded", "async"):
        with pytest.raises(ConfigError, match=r"Set strategy\.consistency=bounded and strategy\.staleness"):
            ParameterServer(consistency=consistency, cache_rows=10)
