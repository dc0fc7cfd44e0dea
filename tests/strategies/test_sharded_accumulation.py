"""Gradients of micro-batches sum to the same mean, whole or sharded; shards take less memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from worldsize.collectives.gather_full import gather_full
from worldsize.core import Cluster, ConfigError, Link, MicroBatch, RunContext, Strategy, Workload, World
from worldsize.data.order import assign_logical_ranks
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.gradient_reducer import GradientReducer
from worldsize.strategies.sharded_reducer import OrderedShardReducer
from worldsize.strategies.single import Single
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds

RANKS, TURNS = 4, 3
CLUSTER = Cluster("test", 1, 8, "cuda", "nccl", links={"node": Link(bandwidth=1e9, latency=1e-5)})


def batch(recipe: Chain, logical_rank: int) -> MicroBatch:
    data = recipe.data("train")
    rows = torch.arange(8) + 8 * logical_rank
    return MicroBatch(tuple(tensor[rows % len(tensor)] for tensor in data.tensors), seed=logical_rank)


def expected(recipe: Chain) -> dict[str, Tensor]:
    """Return the gradient of all micro-batches in plain PyTorch."""
    torch.manual_seed(3)
    model = recipe.model()
    losses = [recipe.loss(model, batch(recipe, rank).data) for rank in range(RANKS * TURNS)]
    torch.stack([loss if isinstance(loss, Tensor) else loss[0] for loss in losses]).mean().backward()  # type: ignore[no-untyped-call]
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("shard", ["all", 2], ids=["one copy", "two copies"])
@pytest.mark.parametrize("accumulate", ["whole", "sharded"])
def test_the_gradient_is_the_mean_of_all_micro_batches(accumulate: str, shard: str | int) -> None:
    recipe = Chain(depth=2)
    gradients = expected(recipe)

    def body(world: World) -> tuple[bool, list[bool]]:
        torch.manual_seed(3)
        replica = FSDP(shard=shard, accumulate=accumulate).replica(recipe, RunContext(world))  # type: ignore[arg-type]
        assert isinstance(replica, SynchronousReplica)
        kept: list[bool] = []

        def backward(micro_batch: MicroBatch, scale: float) -> object:
            record = replica._backward(micro_batch, scale)
            kept.append(has_whole_gradients(replica._module))
            return record

        replica.reducer.run([batch(recipe, world.rank + turn * RANKS) for turn in range(TURNS)], backward)  # type: ignore[arg-type]
        same = [
            torch.allclose(parameter.grad.full_tensor(), gradients[name], rtol=1e-5, atol=1e-7)
            for name, parameter in replica.model.named_parameters()
            if isinstance(parameter.grad, DTensor)
        ]
        return len(same) == len(gradients) and all(same), kept

    for same, kept_whole in run_in_worlds(body, RANKS, local_size=2):
        assert same
        assert kept_whole == [accumulate == "whole"] * (TURNS - 1) + [False]


def has_whole_gradients(module: nn.Module | None) -> bool:
    """Return whether this rank keeps unsharded gradients of micro-batches, from FSDP's internals."""
    assert module is not None
    groups = [
        group
        for unit in module.modules()
        if isinstance(unit, FSDPModule)
        for group in unit._get_fsdp_state()._fsdp_param_groups
    ]
    return any(each.unsharded_accumulated_grad is not None for group in groups for each in group.fsdp_params)


@pytest.mark.parametrize(
    ("micro_batches", "kept"),
    [(4, [1, 1, 2, 0]), (7, [1, 1, 1, 1, 1, 1, 0]), (12, [1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 0])],
)
@pytest.mark.parametrize("shard", ["all", 2], ids=["one copy", "two copies"])
def test_in_the_fixed_tree_too_a_rank_keeps_few_sums_of_its_own_shard_alone(
    shard: str | int, micro_batches: int, kept: list[int]
) -> None:
    """Twelve micro-batches are three nodes of four: at most their running total and two sums of one node exist."""
    recipe = Chain(depth=2)

    def body(world: World) -> list[int]:
        strategy = FSDP(reduce="ordered", shard=shard, accumulate="sharded")  # type: ignore[arg-type]
        replica = strategy.replica(recipe, RunContext(world))
        assert isinstance(replica, SynchronousReplica)
        assert replica.dealing == "block"
        numbers = []

        def backward(micro_batch: MicroBatch, scale: float) -> object:
            record = replica._backward(micro_batch, scale)
            numbers.append(_summed(replica.reducer))
            return record

        mine = range(world.rank * micro_batches, (world.rank + 1) * micro_batches)
        replica.reducer.run([batch(recipe, logical_rank) for logical_rank in mine], backward)  # type: ignore[arg-type]
        return numbers

    whole = sum(parameter.numel() for parameter in recipe.model().parameters())
    padded = 1.2 * whole / RANKS  # each rank, in any copy, sums a quarter; shards consist of whole rows
    for numbers in run_in_worlds(body, RANKS, local_size=2):
        assert 0 < numbers[0] <= padded
        assert [count / numbers[0] for count in numbers] == kept


def _summed(reducer: GradientReducer) -> int:
    """Return the number of elements that the reducer keeps between two micro-batches, from its internals."""
    assert isinstance(reducer, OrderedShardReducer)
    return sum(tensor.numel() for tensor in reducer._scatters.kept)


class Skipping(nn.Module):
    """A chain that can omit its last block or that block's first bias."""

    def __init__(self, chain: nn.Module, left_out: str) -> None:
        super().__init__()
        self.first, self.one, self.other, self.last = chain.children()
        self.left_out = left_out

    def forward(self, inputs: Tensor, leaves_out: bool) -> Tensor:
        hidden = self.one(self.first(inputs))
        if not leaves_out:
            hidden = self.other(hidden, bias=True)
        elif self.left_out == "bias":
            hidden = self.other(hidden, bias=False)
        out: Tensor = self.last(hidden)
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, hidden: Tensor, bias: bool = True) -> Tensor:
        return nn.functional.linear(hidden, self.layer.weight, self.layer.bias if bias else None)


@dataclass(frozen=True)
class Sometimes(Chain):
    """A chain that omits a ``block`` or a ``bias`` in some of a process's micro-batches."""

    left_out: str = "block"
    leaves_out: tuple[int, ...] = ()

    def model(self) -> nn.Module:
        chain = nn.Sequential(nn.Linear(7, 16), Block(), Block(), nn.Linear(16, 3))
        return Skipping(chain, self.left_out)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return [module for module in model.modules() if isinstance(module, Block)]

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        inputs, targets, turn = batch
        return nn.functional.mse_loss(model(inputs, turn in self.leaves_out), targets)


@pytest.mark.parametrize("accumulate", ["whole", "sharded"])
@pytest.mark.parametrize("turns", [(0,), (1,), (3,), (2, 3)])
@pytest.mark.parametrize("left_out", ["block", "bias"])
def test_what_some_micro_batches_leave_out_adds_nothing_in_the_fixed_tree(
    accumulate: str, turns: tuple[int, ...], left_out: str
) -> None:
    recipe = Sometimes(left_out=left_out, leaves_out=turns)

    def trained(strategy: Strategy, world: World) -> Mapping[str, Tensor]:
        replica = strategy.replica(recipe, RunContext(world))
        ranks = assign_logical_ranks(world.rank, world.size, 8, replica.dealing)
        turns = {rank: rank % 4 if accumulate == "sharded" else rank // 2 for rank in ranks}
        made = {rank: batch(recipe, rank) for rank in ranks}
        replica.step([replace(each, data=(*each.data, turns[rank])) for rank, each in made.items()])
        weights = gather_full(replica.state()["model"], world)
        return {name: weight.clone() for name, weight in weights.items()}

    def body(world: World) -> Mapping[str, Tensor]:
        torch.manual_seed(3)
        return trained(FSDP(reduce="ordered", accumulate=accumulate), world)  # type: ignore[arg-type]

    (actual, _) = run_in_worlds(body, 2)
    torch.manual_seed(3)
    alone = trained(Single(reduce="ordered"), World.create_single(torch.device("cpu")))
    assert all(torch.equal(actual[name], weight) for name, weight in alone.items())


@pytest.mark.parametrize(("processes", "sharded"), [(2, True), (3, False), (8, True)])
def test_a_large_model_adds_up_shards_in_the_fixed_tree_where_it_can(processes: int, sharded: bool) -> None:
    work = Workload(parameter_bytes=4e9, optimizer_bytes=8e9, micro_batches=4)
    cluster = replace(CLUSTER, processes=processes)
    chosen = FSDP(reduce="ordered", accumulate="sharded" if sharded else "whole")
    assert FSDP(reduce="ordered").cost(work, cluster) == chosen.cost(work, cluster)
    if not sharded:
        with pytest.raises(ConfigError, match="Set cluster.processes=2, or strategy.accumulate=whole"):
            FSDP(reduce="ordered", accumulate="sharded").roles(cluster)


def test_what_is_kept_whole_is_part_of_the_predicted_memory() -> None:
    work = Workload(parameter_bytes=4e8, optimizer_bytes=8e8, blocks=10, micro_batches=4)
    memory = {name: FSDP(accumulate=name).cost(work, CLUSTER).memory_bytes for name in ("auto", "whole", "sharded")}
    assert memory["whole"] - memory["sharded"] == pytest.approx(4e8)
    assert memory["auto"] == memory["whole"]  # below 1 GiB
    once = replace(work, micro_batches=1)
    assert FSDP(accumulate="whole").cost(once, CLUSTER).memory_bytes == pytest.approx(memory["sharded"])
    large = replace(work, parameter_bytes=4e9)
    assert FSDP().cost(large, CLUSTER) == FSDP(accumulate="sharded").cost(large, CLUSTER)


def test_more_bytes_are_sent_for_it() -> None:
    work = Workload(parameter_bytes=8e8, optimizer_bytes=16e8, blocks=10, micro_batches=4)
    share = 7 / 8 * 8e8
    assert FSDP(accumulate="whole").cost(work, CLUSTER).sent_bytes == pytest.approx((2 * 4 + 1) * share)
    assert FSDP(accumulate="sharded").cost(work, CLUSTER).sent_bytes == pytest.approx((2 * 4 + 4) * share)
