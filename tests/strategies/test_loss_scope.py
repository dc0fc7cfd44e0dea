"""A loss may use any part of its model, or is refused by name before an update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from worldsize.collectives.gather_full import gather_full
from worldsize.core import ConfigError, MicroBatch, Numerics, RunContext, Strategy, World
from worldsize.strategies.ddp import DDP
from worldsize.strategies.fsdp import FSDP
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.strategies.synchronous import SynchronousReplica
from worldsize.testing.contract import assert_same
from worldsize.testing.loops import Case, Loop, largest_difference, outcomes
from worldsize.testing.module_loops import InputDerivative, Penalty, Scalars
from worldsize.testing.training import run_in_roles, train
from worldsize.testing.worlds import run_in_worlds

SMALL = {"wrap": "size", "wrap_parameters": 1}
CLIPPED = Numerics(clip_norm=0.05)


@dataclass(frozen=True)
class FullPenalty(Penalty):
    """Gathers each parameter separately, like programs for FSDP."""

    def _compute_penalty(self, model: nn.Module) -> Tensor:
        sums: list[Any] = [each.square().sum() for each in model.parameters()]
        return torch.stack([each.full_tensor() if isinstance(each, DTensor) else each for each in sums]).sum()


@dataclass(frozen=True)
class ScalarPenalty(Penalty):
    """Adds up scalars: only in the forward pass does torch let a program mix them with whole tensors."""

    def _compute_penalty(self, model: nn.Module) -> Tensor:
        return sum((each.square().sum() for each in model.parameters()), torch.zeros(()))


def batch(recipe: Loop) -> MicroBatch:
    inputs, targets = recipe.data("train")[:8]
    return MicroBatch((inputs, targets), 0, 1)


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        (Penalty(), r"uses body\.0\.weight outside the forward pass"),
        (Penalty(only="head"), r"uses head\.weight outside the forward pass"),
        (FullPenalty(), r"outside the forward pass"),
        (ScalarPenalty(first=True), r"uses head\.bias outside the forward pass"),
        (InputDerivative(), r"takes a derivative through 2,"),
    ],
    ids=["all", "by name", "gathered by itself", "scalars", "derivative"],
)
def test_a_loss_that_needs_a_divided_parameter_is_refused_before_an_update(recipe: Loop, said: str) -> None:
    def body(world: World) -> bool:
        for strategy in (FSDP(**SMALL), FSDP(reduce="ordered", **SMALL), Mesh(**SMALL)):  # type: ignore[arg-type]
            replica = strategy.replica(recipe, RunContext(world))
            before = {name: each.detach().clone() for name, each in replica.trained_weights().items()}
            with pytest.raises(ConfigError, match=f"{said}.*Set strategy.wrap=none"):
                replica.step([batch(recipe)])
            after = gather_full(replica.trained_weights(), world)
            expected = gather_full(before, world)
            assert_same(after, expected)
        return True

    assert run_in_worlds(body, 2) == [True, True]


def test_a_model_that_is_gathered_whole_trains_any_loss() -> None:
    cases = [Case("penalty", Penalty()), Case("derivative", InputDerivative())]
    first = outcomes(Single(reduce="ordered"), cases, 1, logical_ranks=4)
    for strategy in (FSDP(reduce="ordered", wrap="none"), Mesh(reduce="ordered", wrap="none")):
        for name, outcome in outcomes(strategy, cases, 2, logical_ranks=4).items():
            assert not outcome.refusal
            assert_same(outcome.weights, first[name].weights)


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (FSDP(reduce="ordered"), 2),
        (FSDP(reduce="ordered", accumulate="sharded", **SMALL), 4),  # type: ignore[arg-type]
        (FSDP(reduce="ordered", shard=2), 4),
        (Mesh(reduce="ordered"), 2),
    ],
    ids=["fsdp", "sums of shards", "two copies", "mesh"],
)
def test_scalars_have_the_bits_of_one_process_when_clipped(strategy: Strategy, size: int) -> None:
    case = [Case("scalars", Scalars(), numerics=CLIPPED)]
    expected = outcomes(Single(reduce="ordered"), case, 1, logical_ranks=8)["scalars"].weights
    assert_same(outcomes(strategy, case, size, logical_ranks=8)["scalars"].weights, expected)


def test_scalars_train_under_a_loss_scale_beside_shards() -> None:
    cases = [Case("scalars", Scalars(), numerics=Numerics(precision="fp16"))]
    expected = outcomes(Single(reduce="ordered"), cases, 1, logical_ranks=2)["scalars"].weights
    assert_same(outcomes(FSDP(reduce="ordered"), cases, 2, logical_ranks=2)["scalars"].weights, expected)


def test_scalars_are_summed_and_clipped_over_copies_and_shards() -> None:
    case = Case("scalars", Scalars(), numerics=CLIPPED)
    for strategy in (FSDP(shard=2), FSDP(shard=2, accumulate="sharded", **SMALL)):  # type: ignore[arg-type]
        weights = outcomes(strategy, [case], 4, logical_ranks=8)["scalars"].weights
        assert largest_difference(weights, case.train_reference()) < 1e-6


def test_checkpoints_with_scalars_load_under_another_strategy(tmp_path: Path) -> None:
    recipe = Scalars()

    def trained(strategy: Strategy, steps: int, *, save: bool = False, folder: Path | None = tmp_path) -> Any:
        def body(context: RunContext) -> Mapping[str, Tensor]:
            own = replace(context, logical_ranks=2)
            return train(strategy, own, steps, folder, save=save, recipe=recipe).model

        return run_in_roles(strategy, body, 2)[0]

    straight = trained(DDP(reduce="ordered"), 6, folder=None)
    trained(FSDP(reduce="ordered"), 3, save=True)
    assert_same(trained(DDP(reduce="ordered"), 6), straight)
    assert_same(trained(FSDP(reduce="ordered"), 6), straight)


class Asking(nn.Module):
    """Computes with its three inputs, and records whether they are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.same: list[bool] = []

    def forward(self, one: Tensor, two: Tensor, *, three: Tensor) -> Tensor:
        self.same.append(one is two and two is three)
        out: Tensor = self.layer(one * two + three)
        return out


class Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.asking = nn.Linear(4, 4), Asking()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        out: Tensor = self.asking(hidden, hidden, three=hidden)
        return out


class Repeats(Loop):
    def build_net(self) -> nn.Module:
        return Calling()

    def blocks(self, model: Any) -> list[nn.Module]:
        return [model.asking]


def test_a_unit_sees_one_tensor_where_it_is_given_one() -> None:
    def body(world: World) -> bool:
        replica = FSDP().replica(Repeats(), RunContext(world))
        assert isinstance(replica, SynchronousReplica)
        replica.step([batch(Repeats())])
        model: Any = replica.model
        return bool(model.asking.same == [True])

    assert run_in_worlds(body, 2) == [True, True]
