"""Data × tensor × pipeline parallelism against a plain PyTorch loop on one process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recipes.stdlib_lm.recipe import StdlibLM
from worldsize.collectives.whole import whole
from worldsize.core import Numerics, Recipe, Replica, Strategy, World
from worldsize.engine.data import Order, fetch, logical_ranks_of, micro_batches
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.testing.worlds import run_in_worlds

STEPS, BATCH, CLIP = 20, 8, 0.5


def recipe(dropout: float = 0.0) -> StdlibLM:
    optimizer = partial(torch.optim.AdamW, lr=0.003)
    return StdlibLM(
        width=16, depth=3, heads=2, context=12, dropout=dropout, test_bytes=1000, make_optimizer=optimizer
    )


class Seeded(nn.Module):
    pass


def model_of(own: Recipe) -> nn.Module:
    torch.manual_seed(5)
    return own.model()


@cache
def reference(clip: float | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of hand-written training on whole batches."""
    own = recipe()
    model = model_of(own)
    optimizer, dataset = own.optimizer(model), own.data("train")
    order, losses = Order(seed=3, batch_size=BATCH, logical_ranks=1, mine=(0,)), []
    for step in range(1, STEPS + 1):
        loss = own.loss(model, fetch(dataset, order.indices(step, 0, len(dataset))))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def steps(replica: Replica, strategy: Mesh, world: World, first: int, last: int) -> list[float]:
    """Mean loss of each step on this rank's part of the data."""
    data = strategy.layout(world.size).data
    total = BATCH
    mine = logical_ranks_of(strategy.data_rank(world), data, total)
    order = Order(seed=3, batch_size=BATCH, logical_ranks=total, mine=mine)
    batches = micro_batches(recipe().data("train"), order, world.device, first=first)
    found = [torch.stack(list(replica.step(next(batches)).losses)).mean() for _ in range(first, last)]
    means = torch.stack(found).double()
    if world.group is not None:
        torch.distributed.all_reduce(means)
    return (means / world.size).tolist()


def trained(strategy: Mesh, world: World) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(5)
    replica = strategy.replica(recipe(), world)
    losses = steps(replica, strategy, world, 0, STEPS)
    return losses, {name: tensor.clone() for name, tensor in whole(replica.state()["model"], world).items()}


@pytest.mark.parametrize(
    "strategy",
    [
        Mesh(),
        Mesh(tensor=2),
        Mesh(pipeline=2),
        Mesh(data=2),
        Mesh(tensor=2, data=2),
        Mesh(tensor=2, pipeline=2),
        Mesh(data=2, pipeline=2),
        Mesh(data=2, tensor=2, pipeline=2),
        Mesh(pipeline=3, schedule="gpipe"),
        Mesh(pipeline=2, schedule="interleaved"),
        Mesh(data=2, pipeline=2, schedule="interleaved"),
    ],
)
@pytest.mark.parametrize("clip", [None, CLIP])
def test_agrees(strategy: Mesh, clip: float | None) -> None:
    from dataclasses import replace
    strategy = replace(strategy, numerics=Numerics(clip_norm=clip))
    size = (strategy.data or 1) * strategy.tensor * strategy.pipeline
    losses, weights = reference(clip)
    for rank, (found, tensors) in enumerate(run_in_worlds(lambda world: trained(strategy, world), size)):
        print(max(abs(a-b)/b for a,b in zip(found, losses)))
        assert found == pytest.approx(losses, rel=1e-5)
        if rank == 0:
            assert tensors.keys() == weights.keys()
            for name, tensor in weights.items():
                assert torch.allclose(tensors[name], tensor, rtol=1e-3, atol=1e-5), name
