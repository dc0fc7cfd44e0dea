"""A mesh has the same bits for any number of data-parallel parts, and its processes can change places."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategies.memberships import worlds_in
from tests.strategies.test_sharded_accumulation import batch
from worldsize.collectives.gather_full import gather_full
from worldsize.core import Cluster, ConfigError, Numerics, RunContext, Strategy, World
from worldsize.record.determinism import state_digest, tensor_digests
from worldsize.strategies.mesh.strategy import Mesh
from worldsize.strategies.single import Single
from worldsize.testing.recipes import Chain
from worldsize.testing.worlds import run_in_worlds

pytestmark = pytest.mark.heavy


@dataclass(frozen=True)
class Normed(Chain):
    """A chain with a BatchNorm after each block; every micro-batch changes its statistics."""

    def model(self) -> nn.Module:
        first, *blocks, last = super().model().children()
        return nn.Sequential(first, *(nn.Sequential(block, nn.BatchNorm1d(16)) for block in blocks), last)


@dataclass(frozen=True)
class Shared(Chain):
    """A chain whose blocks share one weight, so that three stages sum its gradient."""

    def model(self) -> nn.Module:
        model = super().model()
        first, *others = [block.up for block in self.blocks(model) if isinstance(block.up, nn.Linear)]
        for layer in others:
            layer.weight = first.weight
        return model


HEAL = partial(Mesh, on_failure="heal")
Memberships = tuple[tuple[int, ...], ...]
PAIRS: Memberships = ((0, 1, 2, 3), (0, 2), (0, 2, 4, 1, 3, 5))
THREES: Memberships = ((0, 1, 2), (0, 1, 2, 3, 4, 5))
LOGICAL_RANKS = 7
NORMED = Normed()
CLUSTER = Cluster("test", 1, 6, "cpu", "gloo", timeout=60.0)


def trained(strategy: Strategy, world: World, recipe: Chain = NORMED) -> tuple[str, list[float]]:
    """Take two steps with clipping; return the digest of the weights on the first rank, and the norms."""
    torch.manual_seed(3)
    context = RunContext(world, Numerics(clip_norm=0.1), logical_ranks=LOGICAL_RANKS)
    replica = strategy.replica(recipe, context)
    part, parts = strategy.data_rank(world), strategy.data_parallel(Cluster("test", 1, world.size, "cpu", "gloo"))
    norms: list[Any] = []
    for _ in range(2):
        result = replica.step([batch(recipe, rank) for rank in range(part, LOGICAL_RANKS, parts)])
        norms.append(float(result.grad_norm))  # type: ignore[arg-type]
    return state_digest(tensor_digests(gather_full(replica.state()["model"], world))), norms


def trained_in_each(
    folder: Path, strategy: Mesh, memberships: Memberships, recipe: Chain = NORMED
) -> list[list[tuple[str, list[float]]]]:
    """Return each rank's results of :func:`trained`, one for each membership that it belongs to."""

    def body(world: World) -> list[tuple[str, list[float]]]:
        results = []
        for place in worlds_in(memberships, world, CLUSTER, folder):
            results.append(trained(strategy, place, recipe))
            gc.collect()
        return results

    return run_in_worlds(body, 1 + max(map(max, memberships)))


@pytest.mark.parametrize(
    ("strategy", "memberships"),
    [
        (HEAL(reduce="ordered", tensor=2), PAIRS),
        (HEAL(reduce="ordered", pipeline=2), PAIRS),
        (HEAL(reduce="ordered", pipeline=2, order=["tensor", "pipeline", "data"]), PAIRS),
        pytest.param(
            *(HEAL(reduce="ordered", tensor=2, pipeline=2), ((0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6, 7))),
            marks=pytest.mark.slow,
        ),
        (HEAL(reduce="ordered", pipeline=2, reshard_after_forward=True), PAIRS),
        (HEAL(reduce="ordered", pipeline=3, schedule="interleaved"), THREES),
        (HEAL(reduce="ordered", pipeline=3, schedule="zero_bubble"), THREES),
        (HEAL(reduce="ordered", pipeline=2, schedule="dualpipev"), PAIRS),
    ],
    ids=[
        *("tensor", "pipeline", "pipeline first", "both", "gathered for each pass"),
        *("interleaved", "zero_bubble", "dualpipev"),
    ],
)
def test_meshes_train_alike_in_each_membership(tmp_path: Path, strategy: Mesh, memberships: Memberships) -> None:
    by_rank = trained_in_each(tmp_path, strategy, memberships)
    digests = [digest for digest, _ in by_rank[0]]
    assert digests == digests[:1] * len(memberships)
    first = by_rank[0][0][1]
    assert all(norms == first for results in by_rank for _, norms in results)
    if strategy.tensor == 1:
        ((alone, norms),) = run_in_worlds(lambda world: trained(Single(reduce="ordered"), world), 1)
        assert (digests[0], first) == (alone, norms)


def test_a_weight_that_three_stages_share_has_the_same_bits_sharded_or_not(tmp_path: Path) -> None:
    by_rank = trained_in_each(tmp_path, HEAL(reduce="ordered", pipeline=3, split=[2, 3]), THREES, Shared(depth=3))
    assert by_rank[0][0] == by_rank[0][1]


@pytest.mark.parametrize("options", [{"on_failure": "heal"}, {"data": 2}])
def test_two_stages_of_one_rank_may_not_share_a_weight_if_it_is_or_may_be_sharded(options: Any) -> None:
    recipe, strategy = Shared(), Mesh(pipeline=2, schedule="interleaved")
    model = recipe.model()
    strategy.check_built(recipe, model, recipe.optimizer(model))
    with pytest.raises(ConfigError, match="is shared by two stages of one rank"):
        replace(strategy, **options).check_built(recipe, model, recipe.optimizer(model))


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_flat_sums_weigh_each_logical_rank_alike_where_parts_have_different_numbers(tmp_path: Path, axis: str) -> None:
    by_rank = trained_in_each(tmp_path, Mesh(on_failure="heal", **{axis: 2}), PAIRS)  # type: ignore[arg-type]
    ((_, alone),) = run_in_worlds(lambda world: trained(Single(), world), 1)
    assert all(norms == pytest.approx(alone, rel=1e-4) for results in by_rank for _, norms in results)


def test_an_idle_pass_changes_neither_weights_nor_buffers() -> None:
    """Of two parts with 4 and 3 logical ranks, the second has an idle pass unless 1F1B gathers each stage once."""

    def body(world: World) -> list[tuple[str, list[float]]]:
        gathered, interleaved, in_v = {"reshard_after_forward": True}, {"schedule": "interleaved"}, {"schedule": "zbv"}
        return [trained(HEAL(pipeline=2, **each), world) for each in ({}, gathered, interleaved, in_v)]

    for without, *others in run_in_worlds(body, 4):
        assert others == [without] * 3


class Crossed(nn.Linear):
    """A layer whose input gradient is the transpose of a contiguous tensor, as in a convolution over steps."""

    def forward(self, input: Tensor) -> Tensor:
        return (self.weight @ input.t().contiguous()).t()


@dataclass(frozen=True)
class Strided(Chain):
    """A chain with a crossed layer at the start of each block, so that strided gradients pass between stages."""

    def model(self) -> nn.Module:
        first, *blocks, last = super().model().children()
        return nn.Sequential(first, *(nn.Sequential(Crossed(16, 16, bias=False), block) for block in blocks), last)


def test_messages_between_stages_may_have_any_strides() -> None:
    def norm(strategy: Strategy, world: World) -> float:
        recipe = Strided()
        torch.manual_seed(3)
        replica = strategy.replica(recipe, RunContext(world, Numerics(clip_norm=0.1), logical_ranks=4))
        result = replica.step([batch(recipe, rank) for rank in range(4)])
        assert result.grad_norm is not None
        return float(result.grad_norm)

    (alone,) = run_in_worlds(lambda world: norm(Single(), world), 1)
    staged = run_in_worlds(lambda world: norm(HEAL(pipeline=2), world), 2)
    assert staged == [pytest.approx(alone, rel=1e-5)] * 2
