"""A loss that communicates is refused where its value would depend on the number of processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from worldsize.core import ConfigError, RunContext, Strategy, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, logical_ranks_of
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.zero import ZeRO
from worldsize.testing.loops import Loop
from worldsize.testing.worlds import run_in_worlds


@dataclass(frozen=True)
class Gathered(Loop):
    """Compares each output with the outputs of all processes, as contrastive losses do."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        outputs: Tensor = model(batch[0])
        others = [torch.empty_like(outputs) for _ in range(dist.get_world_size() if dist.is_initialized() else 1)]
        if dist.is_initialized():
            dist.all_gather(others, outputs.detach())
        loss: Tensor = super().loss(model, batch) + 0.1 * (outputs - torch.cat(others).mean()).square().mean()
        return loss


def refusal(strategy: Strategy, world: World, logical_ranks: int) -> str:
    """Take a step; return the refusal, or an empty string."""
    recipe = Gathered()
    replica = strategy.replica(recipe, replace(RunContext(world), logical_ranks=logical_ranks))
    ranks = logical_ranks_of(world.rank, world.size, logical_ranks, replica.dealing)
    batches = micro_batches(recipe.data("train"), Order(3, 24, logical_ranks, ranks), world.device)
    before = [parameter.detach().clone() for parameter in replica.trained_weights().values()]
    try:
        replica.step(next(batches))
    except ConfigError as error:
        after = list(replica.trained_weights().values())
        assert all(bool((one == other).all()) for one, other in zip(before, after, strict=True))
        return str(error)
    return ""


def test_a_loss_that_communicates_is_refused_where_its_value_depends_on_size() -> None:
    def on_two(world: World) -> list[str]:
        ordered = [refusal(strategy(reduce="ordered"), world, 4) for strategy in (DDP, FSDP, ZeRO)]
        return [*ordered, refusal(DDP(), world, 4), refusal(DDP(), world, 2), refusal(FSDP(), world, 2)]

    for *ordered, some, ddp, fsdp in run_in_worlds(on_two, 2):
        assert all("Gathered.loss" in each and "reproducibility=elastic" in each for each in ordered)
        assert "more logical ranks than processes" in some
        assert ddp == fsdp == ""  # a logical rank for each process: the loss sees the whole batch
