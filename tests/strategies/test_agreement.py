"""Strategies match a plain PyTorch loop on one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from worldsize.core import EvaluationBatch, EvaluationBatches, Event, Numerics, Recipe, RunContext, Strategy, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.loop.fit import LoopCallbacks, LoopConfig, fit
from worldsize.strategies.ddp import DDP
from worldsize.strategies.single import Single
from worldsize.testing.worlds import run_in_worlds

STEPS, BATCH, SAMPLES = 50, 24, 101


@dataclass(frozen=True)
class Regression(Recipe):
    """A small regression on fixed random data; 101 samples, so that batches straddle epochs."""

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(7, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def data(self, split: str) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(SAMPLES, 7, generator=generator)
        return TensorDataset(inputs, inputs[:, :3].sin() + inputs[:, 3:6])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(model(inputs), targets)

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        inputs, targets = batch
        return {"error": ((model(inputs) - targets).abs().double().sum(), torch.tensor(targets.numel()))}


def reference(clip_norm: float | None = None) -> dict[str, Tensor]:
    """Train by hand on whole batches, in the documented order of samples."""
    recipe = Regression()
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    dataset = recipe.data("train")
    order = Order(seed=3, batch_size=BATCH, logical_ranks=1, mine=(0,))
    for step in range(1, STEPS + 1):
        rows = order.compute_indices(step, 0, SAMPLES)
        loss = nn.functional.mse_loss(model(dataset.tensors[0][rows]), dataset.tensors[1][rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return model.state_dict()


PLAIN = Numerics()


def trained(
    strategy: Strategy, world: World, logical_ranks: int | None = None, numerics: Numerics = PLAIN
) -> dict[str, Tensor]:
    recipe = Regression()
    total = logical_ranks or world.size
    order = Order(
        seed=3, batch_size=BATCH, logical_ranks=total, mine=assign_logical_ranks(world.rank, world.size, total)
    )
    replica = strategy.replica(recipe, RunContext(world, numerics))
    batches = micro_batches(recipe.data("train"), order, world.device)
    config = LoopConfig(STEPS, batch_size=BATCH)
    fit(replica, batches, world, config=config, callbacks=LoopCallbacks(lambda step: {}, ignore))
    model: dict[str, Tensor] = replica.state()["model"]
    return {name: tensor.clone() for name, tensor in model.items()}


def ignore(event: Event) -> None:
    pass


def assert_equal_weights(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (actual[name] - tensor).norm() / tensor.norm()
        assert error < 1e-6, f"{name}: relative difference {error}"


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ddp_agrees_with_plain_pytorch_on_the_same_global_batch(size: int) -> None:
    for weights in run_in_worlds(lambda world: trained(DDP(), world), size):
        assert_equal_weights(weights, reference())


def test_single_agrees_with_plain_pytorch() -> None:
    (weights,) = run_in_worlds(lambda world: trained(Single(), world), 1)
    assert_equal_weights(weights, reference())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_accumulating_logical_ranks_gives_the_same_step(size: int) -> None:
    for weights in run_in_worlds(lambda world: trained(DDP(), world, logical_ranks=6), size):
        assert_equal_weights(weights, reference())


def test_clipping_acts_on_the_global_gradient() -> None:
    numerics = Numerics(clip_norm=0.05)
    for weights in run_in_worlds(lambda world: trained(DDP(), world, numerics=numerics), 3):
        assert_equal_weights(weights, reference(clip_norm=0.05))


def test_a_module_that_a_recipe_keeps_in_evaluation_mode_stays_so_after_an_evaluation() -> None:
    @dataclass(frozen=True)
    class Frozen(Regression):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Dropout().eval(), super().model())

    def modes(world: World) -> list[bool]:
        replica = Single().replica(recipe := Frozen(), RunContext(world))
        replica.evaluate(EvaluationBatches(lambda: iter([EvaluationBatch(0, recipe.data("test")[:3])])))
        return [module.training for module in replica.model.modules()]  # type: ignore[attr-defined]

    assert run_in_worlds(modes, 1)[0][:3] == [True, False, True]


def test_ranks_hold_the_same_bits() -> None:
    first, *others = run_in_worlds(lambda world: trained(DDP(), world), 4)
    for other in others:
        assert all(torch.equal(other[name], tensor) for name, tensor in first.items())
