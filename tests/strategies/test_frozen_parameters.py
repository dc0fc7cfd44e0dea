"""A recipe with frozen and additional parameters trains, resumes and has equal bits under every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.checkpoint.format import Retention
from worldsize.checkpoint.load import find_newest, load_checkpoint
from worldsize.checkpoint.save import Saver
from worldsize.collectives.gather_full import gather_full
from worldsize.core import RunContext, Strategy, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.single import Single
from worldsize.strategies.zero import ZeRO
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy

RANKS = 4  # logical ones


@final
class Adapted(nn.Module):
    """A frozen linear layer beside a trained product of two thin matrices (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden_bw: Tensor) -> Tensor:
        product: Tensor = self.base(hidden_bw) + self.up(self.down(hidden_bw))
        return product


@dataclass(frozen=True)
class Tuned(Chain):
    """A frozen body with adapters, and a new head in place of the original one."""

    def model(self) -> nn.Module:
        body = super().model().requires_grad_(False)
        assert isinstance(body, nn.Sequential)
        for block in self.blocks(body):
            for name in ("up", "down"):
                setattr(block, name, Adapted(block.get_submodule(name)))  # type: ignore[arg-type]
        body[-1] = nn.Linear(16, 3)
        return body

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01)


def trained(world: World, strategy: Strategy, steps: int, folder: Path | None = None) -> Mapping[str, Tensor]:
    """Train up to ``steps``, from the newest checkpoint in ``folder``, and save a new one; rank 0 has the model."""
    recipe = Tuned()
    replica = strategy.replica(recipe, RunContext(world))
    checkpoint = find_newest(folder, world) if folder else None
    if checkpoint:
        replica.load(load_checkpoint(checkpoint, replica.state()))
    first = checkpoint.step if checkpoint else 0
    order = Order(3, 24, RANKS, assign_logical_ranks(world.rank, world.size, RANKS))
    batches = micro_batches(recipe.data("train"), order, world.device, first=first)
    for _ in range(first, steps):
        replica.step(next(batches))
    if folder:
        saver = Saver(folder, world, world.groups.get(f"checkpoint/{world.role}"), keep=Retention(last=9))
        saver.save(replica.state(), step=steps, facts={"metrics": {}})
        saver.finish()
        saver.close()
    return {name: tensor.clone() for name, tensor in gather_full(replica.state()["model"], world).items()}


@pytest.fixture(scope="module")
def alone() -> Mapping[str, Tensor]:
    model: Mapping[str, Tensor] = run_in_worlds(lambda world: trained(world, Single(reduce="ordered"), 6), 1)[0]
    return model


def different(model: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    assert model.keys() == other.keys()
    return [name for name, tensor in model.items() if not torch.equal(tensor, other[name])]


def test_the_body_stays_and_adapters_and_head_are_trained(alone: Mapping[str, Tensor]) -> None:
    names = {name for name, each in Tuned().model().named_parameters() if each.requires_grad}
    assert set(different(Tuned().model().state_dict(), alone)) == names


@pytest.mark.parametrize("strategy", [DDP(reduce="ordered"), ZeRO(reduce="ordered"), FSDP(reduce="ordered")], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_its_bits_are_those_of_one_process(strategy: Strategy, size: int, alone: Mapping[str, Tensor]) -> None:
    assert different(run_in_worlds(lambda world: trained(world, strategy, 6), size)[0], alone) == []


def test_it_goes_on_under_other_strategies_at_other_sizes(tmp_path: Path, alone: Mapping[str, Tensor]) -> None:
    ways: list[tuple[Strategy, int, int]] = [
        (FSDP(reduce="ordered"), 2, 2),
        (ZeRO(reduce="ordered"), 4, 4),
        (DDP(reduce="ordered"), 2, 5),
        (FSDP(reduce="ordered"), 4, 6),
    ]
    for strategy, size, steps in ways:
        model = run_in_worlds(lambda world: trained(world, strategy, steps, tmp_path), size)[0]  # noqa: B023
    assert different(model, alone) == []
