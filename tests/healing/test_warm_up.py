"""A process that joins a gang later first does the work that needs no peers, and leaves no trace of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from worldsize.healing.loop import joins_later, warm_up
from worldsize.world.environments import Placement


class Recipe:
    def __init__(self, *, can_be_described: bool) -> None:
        self.models: list[nn.Module] = []
        self.can_be_described = can_be_described

    def model(self) -> nn.Module:
        model = nn.Linear(300, 300)
        self.models.append(model)
        if not self.can_be_described:
            self.weights = model.weight.detach()
        return model


@pytest.mark.parametrize(("shards", "can_be_described"), [(True, True), (True, False), (False, True)])
def test_nothing_of_a_warm_up_stays(shards: bool, can_be_described: bool) -> None:
    recipe = Recipe(can_be_described=can_be_described)
    before = torch.get_rng_state()
    warm_up(recipe.model if shards else None)
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), before)
    assert len(recipe.models) == shards  # and it was not created, if it cannot be described


@pytest.mark.parametrize(
    ("rank", "starts", "later"), [(0, 0, False), (3, 0, False), (3, 1, True), (0, 2, True), (4, 0, True)]
)
def test_who_joins_later(rank: int, starts: int, later: bool) -> None:
    """Four processes begin: others are spares or were added, and a restarted one replaces itself."""
    assert joins_later(Placement(rank, 4, rank, 4, "file:///gang", starts=starts)) is later
