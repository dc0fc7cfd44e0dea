"""A process that joins a gang later does first what it can do alone, of which nothing stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from worldsize.strategies.deferred.known import KnownModels
from worldsize.worker.warm_up import joins_later, warm_up
from worldsize.world.environments import Placement


class Recipe:
    def __init__(self) -> None:
        self.models: list[nn.Module] = []

    def model(self) -> nn.Module:
        model = nn.Linear(300, 300)
        self.models.append(model)
        return model


@pytest.mark.parametrize("shards", [True, False])
def test_nothing_of_a_warm_up_stays(shards: bool) -> None:
    recipe: Any = Recipe()
    settings: Any = SimpleNamespace(strategy=SimpleNamespace(shards_state=shards), recipe=recipe)
    before = torch.get_rng_state()
    warm_up(settings, KnownModels())
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), before)
    assert [each.weight.is_meta for each in recipe.models] == [True] * shards  # described, and not made


@pytest.mark.parametrize(
    ("rank", "starts", "later"), [(0, 0, False), (3, 0, False), (3, 1, True), (0, 2, True), (4, 0, True)]
)
def test_who_joins_later(rank: int, starts: int, later: bool) -> None:
    """Four processes begin: others are spares or were added, and one that is started again replaces itself."""
    assert joins_later(Placement(rank, 4, rank, 4, "file:///gang", starts=starts)) is later
