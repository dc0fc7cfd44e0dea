"""A process that joins a gang later does first what it can do alone, of which nothing stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from worldsize.reproducibility.seeds import seed_generators, stream
from worldsize.strategies.deferred.known import KnownModels
from worldsize.strategies.deferred.model import DeferredModel, known_models, state_follows
from worldsize.worker.warm_up import joins_later, warm_up
from worldsize.world.environments import Placement


class Recipe:
    def __init__(self) -> None:
        self.models: list[nn.Module] = []

    def model(self) -> nn.Module:
        model = nn.Linear(300, 300)
        model.register_buffer("order", torch.randperm(9), persistent=False)
        model.register_buffer("noise", torch.tensor(numpy.random.rand(9)), persistent=False)
        self.models.append(model)
        return model


def settings_of(recipe: Any, *, shards: bool) -> Any:
    return SimpleNamespace(
        strategy=SimpleNamespace(shards_state=shards), recipe=recipe, training=SimpleNamespace(seed=3)
    )


@pytest.mark.parametrize("shards", [True, False])
def test_nothing_of_a_warm_up_stays(shards: bool) -> None:
    recipe: Any = Recipe()
    before = torch.get_rng_state()
    warm_up(settings_of(recipe, shards=shards), KnownModels())
    assert not dist.is_initialized()
    assert torch.equal(torch.get_rng_state(), before)
    assert [each.weight.is_meta for each in recipe.models] == [True] * shards  # described, and not made


def test_what_is_known_after_a_warm_up_is_what_the_members_draw() -> None:
    recipe: Any = Recipe()
    known = KnownModels()
    seed_generators(7, torch.device("cpu"))
    warm_up(settings_of(recipe, shards=True), known)
    seed_generators(stream(3, "init"), torch.device("cpu"))
    expected = dict(recipe.model().named_buffers())
    seed_generators(stream(3, "init"), torch.device("cpu"))
    with state_follows(), known_models(known):
        buffers = dict(DeferredModel.build(recipe.model).model.named_buffers())
    assert len(recipe.models) == 3  # it was not recorded again
    assert all(torch.equal(buffers[name], each) for name, each in expected.items())


@pytest.mark.parametrize(
    ("rank", "starts", "later"), [(0, 0, False), (3, 0, False), (3, 1, True), (0, 2, True), (4, 0, True)]
)
def test_who_joins_later(rank: int, starts: int, later: bool) -> None:
    """Four processes begin: others are spares or were added, and one that is started again replaces itself."""
    assert joins_later(Placement(rank, 4, rank, 4, "file:///gang", starts=starts)) is later
