"""``reproducibility=elastic`` gives the same digests of weights and logged metrics at every world size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from worldsize.core import MicroBatch, Recipe, RunContext, Strategy, World
from worldsize.data.loader import micro_batches
from worldsize.data.order import Order, assign_logical_ranks
from worldsize.record.determinism import state_digest, tensor_digests
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.single import Single
from worldsize.strategies.zero import ZeRO
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy

DIGITS = ("recipe=digits", "steps=30", "clip_norm=0.5", "evaluate_every=20")
GPT = (
    "recipe=stdlib_lm",
    "steps=4",
    "recipe.width=32",
    "recipe.depth=2",
    "recipe.dropout=0.1",
    "recipe.test_bytes=20000",
)


def digests(train: Any, *options: str) -> tuple[str, str]:
    run = train("reproducibility=elastic", *options)
    assert run.code == 0, run.error
    result = run.json("result.json")
    return result["state_digest"], result["metrics_digest"]


def test_one_two_four_and_eight_processes_end_with_the_same_bits(train: Any) -> None:
    different = {digests(train, *DIGITS, f"cluster.processes={size}") for size in (1, 2, 4, 8)}
    assert len(different) == 1


def test_bfloat16_and_dropout_end_with_the_same_bits_at_every_world_size(train: Any) -> None:
    different = {digests(train, *GPT, "precision=bf16", f"cluster.processes={size}") for size in (1, 8)}
    assert len(different) == 1


def test_six_logical_ranks_end_with_the_same_bits_on_one_two_three_and_six_processes(train: Any) -> None:
    different = {digests(train, *DIGITS, "logical_ranks=6", f"cluster.processes={size}") for size in (1, 2, 3, 6)}
    assert len(different) == 1


def test_shards_of_micro_batches_add_up_to_the_same_bits_at_every_world_size(train: Any) -> None:
    """Each of 24 logical ranks moves to a different rank when the world size changes; 6 is not a power of two."""
    lengths = (*DIGITS, "logical_ranks=24", "batch_size=48")
    alone = digests(train, *lengths, "strategy=single", "cluster.processes=1")
    for size, shard in ((4, "2"), (8, "all")):
        sharded = ("strategy=fsdp", "strategy.accumulate=sharded", f"strategy.shard={shard}")
        assert digests(train, *lengths, *sharded, f"cluster.processes={size}") == alone


def test_three_processes_cannot_add_up_shards_with_the_bits_of_one(train: Any) -> None:
    options = ("strategy=fsdp", "strategy.accumulate=sharded", "logical_ranks=6", "cluster.processes=3")
    run = train("reproducibility=elastic", *options)
    assert run.code == 2
    assert "Set cluster.processes=2, or strategy.accumulate=whole." in run.error
    assert run.folder is None, "no run has begun"


def test_another_strategy_and_another_bucket_size_do_not_change_a_bit(train: Any) -> None:
    single = digests(train, *DIGITS, "strategy=single", "cluster.processes=1")
    assert digests(train, *DIGITS, "strategy.bucket_mb=0.01", "cluster.processes=4") == single


def test_plain_ddp_does_change_bits(train: Any) -> None:
    """Without this difference, the tests above would prove nothing."""
    different = {digests(train, *DIGITS, "reproducibility.reduce=flat", f"cluster.processes={size}") for size in (1, 4)}
    assert len(different) == 2


def test_the_manifest_says_that_the_run_is_bitwise_reproducible(train: Any) -> None:
    run = train("reproducibility=elastic", "recipe=digits", "steps=1", "cluster.processes=1")
    assert run.json("run_manifest.json")["reproducibility"]["level"] == "bitwise"


class Scaled(nn.Module):
    """A layer that scales by a constant buffer, and has a second buffer with infinities."""

    fixed: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("fixed", torch.rand(9))
        self.register_buffer("mask", torch.tensor([-torch.inf, 0.0, torch.inf]))

    def forward(self, hidden_bw: Tensor) -> Tensor:
        return hidden_bw * self.fixed


@dataclass(frozen=True)
class Normalised(Recipe):
    """A recipe with BatchNorm and dropout on fixed random data."""

    inputs: Tensor = field(default_factory=lambda: torch.randn(96, 5, generator=torch.Generator().manual_seed(2)))

    def model(self) -> nn.Module:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(5, 9), nn.BatchNorm1d(9), Scaled(), nn.Dropout(0.3), nn.Linear(9, 1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def data(self, split: str) -> TensorDataset:
        return TensorDataset(self.inputs, self.inputs.sum(1, keepdim=True))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor, Tensor]]:
        return {}


def trained(strategy: Strategy, world: World) -> Mapping[str, Tensor]:
    recipe = Normalised()
    replica = strategy.replica(recipe, RunContext(world))
    mine = assign_logical_ranks(world.rank, world.size, 12, replica.dealing)
    order = Order(seed=1, batch_size=48, logical_ranks=12, mine=mine)
    batches = micro_batches(recipe.data("train"), order, world.device)
    for _ in range(10):
        replica.step(next(batches))
    state: Mapping[str, Tensor] = {name: value.clone() for name, value in replica.state()["model"].items()}
    return state


def test_batch_norm_statistics_are_the_same_at_every_world_size() -> None:
    plain = partial(trained, DDP(reduce="ordered"))
    states = [state for size in (1, 2, 3, 4, 6) for state in run_in_worlds(plain, size)]
    assert len({state_digest(tensor_digests(state)) for state in states}) == 1
    for size in (2, 4):  # parameters come in shards, buffers do not
        for state in run_in_worlds(partial(trained, FSDP(reduce="ordered", accumulate="sharded")), size):
            assert all(torch.equal(state[name], states[0][name]) for name in ("1.running_mean", "1.running_var"))
    assert states[0]["1.running_mean"].abs().sum() > 0
    assert states[0]["1.num_batches_tracked"] == 10


@pytest.mark.parametrize(
    ("strategy", "size"), [(DDP(reduce="ordered"), 1), (Single(), 1), (DDP(), 3), (ZeRO(), 2), (FSDP(), 2)]
)
def test_batch_norm_statistics_are_the_mean_over_logical_ranks(strategy: Strategy, size: int) -> None:
    """One step by hand: every micro-batch starts from zero mean and moves a tenth of the way."""
    recipe = Normalised()
    order = Order(seed=1, batch_size=48, logical_ranks=12, mine=tuple(range(12)))
    batches: list[MicroBatch] = next(micro_batches(recipe.data("train"), order, torch.device("cpu")))
    linear: Any = recipe.model()
    means = [0.1 * linear[0](batch.data[0]).mean(0) for batch in batches]
    expected = torch.stack(means).mean(0)

    def after_one_step(world: World) -> Mapping[str, Tensor]:
        replica = strategy.replica(recipe, RunContext(world))
        replica.step([batches[rank] for rank in assign_logical_ranks(world.rank, world.size, 12)])
        model = replica.state()["model"]
        return {name: model[name].clone() for name, _ in recipe.model().named_buffers()}  # no strategy shards buffers

    states = run_in_worlds(after_one_step, size)
    assert len({state_digest(tensor_digests(state)) for state in states}) == 1, "equal on all ranks"
    assert torch.allclose(states[0]["1.running_mean"], expected, rtol=1e-5, atol=1e-7)
    assert states[0]["1.num_batches_tracked"] == 1
    for name in ("2.fixed", "2.mask"):
        assert torch.equal(states[0][name], recipe.model().state_dict()[name]), "a buffer that nothing changes"
