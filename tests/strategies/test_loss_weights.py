"""A loss that returns its weight has the gradient of the whole batch, however samples are dealt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from worldsize.collectives.gather_full import gather_full
from worldsize.core import Cluster, MicroBatch, Numerics, Recipe, RunContext, Strategy, World
from worldsize.data.batches import fetch_batch
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.loss_record import mean_loss
from worldsize.strategies.loss_scaling import fp16_share, weight_factor
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.zero import ZeRO
from worldsize.testing.worlds import run_in_worlds

STEPS, BATCH, SEED = 6, 16, 3
LENGTH = 9


@dataclass(frozen=True)
class Sentences(Recipe):
    """Predict numbers from numbers at the places that count; sequences are padded, and many are short."""

    double: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        return model.double() if self.double else model

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    def data(self, split: str) -> Any:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(61, LENGTH, 1, generator=generator, dtype=torch.float64 if self.double else None)
        lengths = torch.randint(1, LENGTH + 1, (61, 1), generator=generator) ** 2 // LENGTH
        return torch.utils.data.TensorDataset(inputs, torch.arange(LENGTH) < lengths)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, counts = batch
        squares = (model(*self.model_inputs(batch)) - inputs.sin() * 3)[..., 0].square()
        return squares[counts].sum(), counts.sum()

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {"squares": self.loss(model, batch)}

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())

    def model_inputs(self, batch: Any) -> tuple[Tensor]:
        return (batch[0],)


def plain(recipe: Recipe, clip: float | None) -> tuple[list[float], Mapping[str, Tensor]]:
    """Train in plain PyTorch on whole batches."""
    model, data, losses = recipe.model(), recipe.data("train"), []
    optimizer, order = recipe.optimizer(model), Order(SEED, BATCH, 1, (0,))
    for step in range(1, STEPS + 1):
        loss = recipe.loss(model, fetch_batch(data, order.compute_indices(step, 0, len(data))))
        assert isinstance(loss, tuple)
        total, count = loss
        optimizer.zero_grad()
        (total / count).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(float((total / count).detach()))
    return losses, model.state_dict()


def trained(
    strategy: Strategy, world: World, logical_ranks: int, recipe: Recipe, clip: float | None
) -> tuple[list[float], Mapping[str, Tensor]]:
    replica = strategy.replica(recipe, RunContext(world, numerics=Numerics(clip_norm=clip)))
    parts = strategy.data_parallel(Cluster("test", 1, world.size, "cpu", "gloo"))
    mine = assign_logical_ranks(strategy.data_rank(world), parts, logical_ranks, replica.dealing)
    batches = micro_batches(recipe.data("train"), Order(SEED, BATCH, logical_ranks, mine), world.device)
    shares = torch.zeros(STEPS)
    for step in range(STEPS):
        shares[step] = torch.stack(list(replica.step(next(batches)).losses)).mean()
    if world.group is not None:
        torch.distributed.all_reduce(shares, group=world.group)
    model = {name: tensor.clone() for name, tensor in gather_full(replica.state()["model"], world).items()}
    return (shares / world.size).tolist(), model


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("clip", [None, 0.5], ids=["", "clipped"])
@pytest.mark.parametrize(
    ("strategy", "processes", "logical_ranks"),
    [
        (DDP(), 1, 1),
        (DDP(), 1, 4),
        (DDP(), 2, 4),
        (DDP(), 4, 8),
        (ZeRO(), 2, 4),
        (FSDP(), 2, 4),
        (FSDP(reduce="ordered", shard=2), 4, 8),
        (FSDP(reduce="ordered", accumulate="sharded"), 2, 8),
        (Mesh(pipeline=2), 4, 8),
        (Mesh(), 2, 4),
    ],
    ids=str,
)
def test_unequal_micro_batches_have_the_gradient_of_the_whole_batch(
    strategy: Strategy, processes: int, logical_ranks: int, clip: float | None, *, double: bool
) -> None:
    recipe = Sentences(double)
    losses, model = plain(recipe, clip)
    found, weights = run_in_worlds(lambda world: trained(strategy, world, logical_ranks, recipe, clip), processes)[0]
    assert found == pytest.approx(losses, rel=1e-6)  # shares are summed in float32
    is_exact = double and not (clip and isinstance(strategy, Mesh))  # their norm is float32
    tolerance = 1e-12 if is_exact else 1e-6
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, model[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("strategy", [DDP(reduce="ordered"), FSDP(reduce="ordered")], ids=["ddp", "fsdp"])
def test_ordered_sums_have_the_same_bits_at_every_world_size(strategy: Strategy) -> None:
    recipe = Sentences()
    _, alone = trained(DDP(reduce="ordered"), World.create_single(torch.device("cpu")), 8, recipe, 0.5)
    for processes in (2, 4):
        _, weights = run_in_worlds(lambda world: trained(strategy, world, 8, recipe, 0.5), processes)[0]
        for name, tensor in weights.items():
            assert torch.equal(tensor, alone[name]), f"{name} at {processes} processes"


def test_weights_that_are_no_integers_are_added_in_one_order() -> None:
    weights = [torch.tensor(0.1 * (rank + 1), dtype=torch.float64) for rank in range(8)]
    alone = weight_factor(weights, None)
    assert float(alone) == pytest.approx(8 / 3.6)
    for processes in (2, 4):
        found = run_in_worlds(lambda world: weight_factor(weights[world.rank :: world.size], world.group), processes)
        assert all(torch.equal(each, alone) for each in found)


def test_a_step_in_which_nothing_weighs_anything_has_no_gradient() -> None:
    assert weight_factor([torch.zeros((), dtype=torch.float64)], None) == 0


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 700.0), (0.0, 4096.0)])
def test_sums_in_float16_are_brought_near_their_mean_by_one_power_of_two(weights: tuple[float, ...]) -> None:
    def body(world: World) -> float:
        return float(fp16_share(torch.tensor(weights[world.rank], dtype=torch.float64), world.group))

    (share,) = set(run_in_worlds(body, len(weights)))
    assert 0.5 < share * max(1.0, *weights) <= 1
    assert math.log2(share).is_integer()


@dataclass(frozen=True)
class Thousands(Sentences):
    """Weight every place as if it were a thousand."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        total, count = super().loss(model, batch)
        return total / 100 * 1000, count * 1000


@dataclass(frozen=True)
class Means(Sentences):
    """Return the mean itself."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:  # type: ignore[override]
        return mean_loss(super().loss(model, batch)) / 100


@pytest.mark.parametrize("recipe", [Thousands(), Means()], ids=["sum", "mean"])
def test_a_sum_over_thousands_skips_no_step_in_float16(recipe: Recipe) -> None:
    numerics = Numerics(precision="fp16")
    replica = DDP().replica(recipe, RunContext(World.create_single(torch.device("cpu")), numerics=numerics))
    before = replica.state()["model"]["0.weight"].clone()
    replica.step([MicroBatch(fetch_batch(recipe.data("train"), torch.arange(8)), seed=1)])
    assert replica.state()["scaler"]["scale"] == 65536
    assert not torch.equal(replica.state()["model"]["0.weight"], before)
