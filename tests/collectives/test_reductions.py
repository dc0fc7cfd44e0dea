"""Compressed and hierarchical sums match float64 sums of the same numbers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from worldsize.collectives.reductions import CODECS, all_reduced, hierarchical, reduce_compressed
from worldsize.collectives.staged import finish_reduction
from worldsize.core import World
from worldsize.strategies.communication_hooks import Tiers
from worldsize.testing.worlds import run_in_worlds

LENGTH = 2501  # not a multiple of a world size, and more than two blocks


def row(rank: int, step: int = 0) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(100 * step + rank))


def exact(size: int, step: int = 0) -> Tensor:
    return torch.stack([row(rank, step).double() for rank in range(size)]).sum(0)


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("name", "size", "most"),
    [("bf16", 2 * LENGTH, 4e-3), ("fp16", 2 * LENGTH, 5e-4), ("int8", 3 * (1024 + 4), 1e-2)],
)
def test_a_codec_has_the_promised_error_and_size(name: str, size: int, most: float) -> None:
    values = torch.stack([row(0), 1000 * row(1), torch.zeros(LENGTH)])
    wire = CODECS[name].encode(values)
    assert wire.dtype == torch.uint8
    assert wire.shape[1] == size
    decoded = CODECS[name].decode(wire, LENGTH)
    assert [error(decoded[place], values[place].double()) < most for place in (0, 1)] == [True, True]
    assert torch.equal(decoded[2], values[2])


def test_the_error_of_int8_is_at_most_half_a_level() -> None:
    """A level is 1/127 of the largest number of each block of 1,024."""
    values = row(3)
    whole = CODECS["int8"].decode(CODECS["int8"].encode(values[None]), LENGTH)[0]
    for block, decoded in zip(torch.split(values, 1024), torch.split(whole, 1024), strict=True):
        assert (block - decoded).abs().max() <= block.abs().max() / 127 / 2 * 1.0001


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("name", "most"), [("bf16", 6e-3), ("fp16", 1e-3), ("int8", 1.5e-2)])
def test_a_compressed_sum_is_near_the_exact_one_and_the_same_on_all_ranks(size: int, name: str, most: float) -> None:
    def body(world: World) -> Tensor:
        assert world.group is not None
        return finish_reduction(reduce_compressed(row(world.rank), world.group, CODECS[name]))

    first, *others = run_in_worlds(body, size)
    assert error(first, exact(size)) < most
    assert all(torch.equal(first, other) for other in others)


def test_compression_errors_are_fed_back() -> None:
    """The error of a sum over many steps is one step's error, not the sum of all (Karimireddy et al. 2019, lemma 3)."""
    steps = 50

    def body(world: World) -> tuple[Tensor, Tensor]:
        assert world.group is not None
        fed, left, lost = torch.zeros(LENGTH), torch.zeros(LENGTH), torch.zeros(LENGTH)
        for step in range(steps):
            fed += finish_reduction(reduce_compressed(row(world.rank, step), world.group, CODECS["int8"], left))
            lost += finish_reduction(reduce_compressed(row(world.rank, step), world.group, CODECS["int8"]))
        return fed, lost

    fed, lost = run_in_worlds(body, 3)[0]
    expected = torch.stack([exact(3, step) for step in range(steps)]).sum(0)
    assert error(fed, expected) < 0.35 * error(lost, expected)


@pytest.mark.parametrize(("size", "local_size"), [(4, 2), (6, 3), (6, 2)])
def test_a_hierarchical_sum_agrees_with_the_exact_one(size: int, local_size: int) -> None:
    def body(world: World) -> Tensor:
        return finish_reduction(
            hierarchical(row(world.rank), [world.groups["node"]], world.groups["across"], all_reduced)
        )

    for total in run_in_worlds(body, size, local_size=local_size):
        assert error(total, exact(size)) < 1e-6


@pytest.mark.parametrize(("size", "local_size", "tiers"), [(8, 2, {"rack": 2}), (8, 1, {"rack": 2, "pod": 4})])
def test_a_sum_over_any_number_of_tiers_agrees_with_the_exact_one(
    size: int, local_size: int, tiers: dict[str, int]
) -> None:
    def body(world: World) -> tuple[Tensor, list[list[int]], int]:
        groups = Tiers.from_world(world)
        assert groups is not None
        total = finish_reduction(hierarchical(row(world.rank), groups.inner, groups.across, all_reduced))
        return total, [dist.get_process_group_ranks(each) for each in (*groups.inner, groups.across)], groups.shares

    results = run_in_worlds(body, size, local_size=local_size, tiers=tiers)
    for total, groups, shares in results:
        assert error(total, exact(size)) < 1e-6
        assert torch.equal(total, results[0][0])
        assert shares == 4
        assert len(groups) == 3
    assert results[5][1] == [[4, 5], [5, 7], [1, 5]]  # equal assignments below, whatever the names of the tiers
