"""Exact reductions over real gloo processes match fractions computed without rounding."""

from __future__ import annotations

import math
import random
import struct
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from worldsize.collectives import exact
from worldsize.collectives.exact import accumulate_values, exact_sum, reduce_metrics, round_sums
from worldsize.core import World
from worldsize.testing.worlds import run_in_worlds

random.seed(0)
SUMS = [random.uniform(-1, 1) * 10 ** random.randint(-8, 8) for _ in range(11)]
COUNTS = [random.randint(1, 9) for _ in SUMS]
EXACT = float(sum(map(Fraction, SUMS))) / sum(COUNTS)


def metric(world: World) -> float:
    mine = {
        index: {"value": (torch.tensor(SUMS[index], dtype=torch.float64), torch.tensor(COUNTS[index]))}
        for index in range(world.rank, len(SUMS), world.size)
    }
    return reduce_metrics(mine, ("value",), world)["value"]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_metric_is_correctly_rounded_at_every_world_size(size: int) -> None:
    assert run_in_worlds(metric, size) == [EXACT] * size


def test_a_rank_without_batches_takes_part() -> None:
    def lonely(world: World) -> float:
        mine = {0: {"value": (torch.tensor(3.0), torch.tensor(2))}} if world.rank == 0 else {}
        return reduce_metrics(mine, ("value",), world)["value"]

    assert run_in_worlds(lonely, 3) == [1.5] * 3


Total = Callable[[Sequence[float]], float]


def in_accumulators(values: Sequence[float]) -> float:
    """Sum in two accumulators, one per half."""
    middle = len(values) // 2
    first, second = (torch.tensor([half], dtype=torch.float64) for half in (values[:middle], values[middle:]))
    return round_sums(accumulate_values(first) + accumulate_values(second))[0]


@pytest.mark.parametrize("total", [in_accumulators, exact_sum])
def test_any_sum_is_that_of_fractions(total: Total) -> None:
    generator = random.Random(1)
    for _ in range(300):
        bits = [generator.getrandbits(64) for _ in range(generator.randint(0, 9))]
        values = [value for value in struct.unpack(f"{len(bits)}d", struct.pack(f"{len(bits)}Q", *bits))]
        finite = [value for value in values if math.isfinite(value)]
        assert total(finite) == math.fsum(finite)  # of any sizes, down to the smallest
    near = [generator.uniform(-1, 1) * 2.0 ** generator.randint(-80, 80) for _ in range(10_000)]
    assert total(near) == float(sum(map(Fraction, near)))


@pytest.mark.parametrize("total", [in_accumulators, exact_sum])
def test_the_smallest_and_the_largest_floats_are_added_exactly(total: Total) -> None:
    tiny, largest = 5e-324, sys.float_info.max
    assert total([tiny, tiny, -largest, tiny, largest]) == 3 * tiny
    assert total([largest, -tiny]) == largest
    assert total([2.0**-1022, -tiny]) == 2.0**-1022 - tiny  # the largest number without a leading bit
    assert total([1.0, 2.0**-53]) == 1.0  # halves round to even
    assert total([1.0, 2.0**-53, tiny]) == 1.0 + 2.0**-52
    assert total([-0.0]) == 0.0


@pytest.mark.parametrize("total", [in_accumulators, exact_sum])
def test_a_sum_beyond_floats_is_infinite_and_one_that_only_passes_beyond_them_is_exact(total: Total) -> None:
    assert total([1e308, 1e308]) == math.inf
    assert total([-1e308, 1.0, -1e308]) == -math.inf
    assert total([1e308, 1e308, -1e308]) == total([1e308, -1e308, 1e308]) == 1e308
    assert total([math.inf, 1e308, 1e308]) == math.inf
    assert total([-math.inf, 1e308]) == -math.inf
    assert math.isnan(total([math.inf, 1.0, -math.inf]))
    assert math.isnan(total([math.nan, 1.0, math.inf]))
    assert total([]) == 0


def test_what_a_rank_sends_does_not_grow_with_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    def start_all_reduce(table: Tensor, world: World) -> Callable[[], Tensor]:
        sent.append(table.numel())
        return table.cpu

    monkeypatch.setattr(exact, "start_all_reduce", start_all_reduce)
    alone = World.create_single(torch.device("cpu"))
    for count in (1, 1000):
        sums = {index: {"value": (torch.ones(()), torch.ones(()))} for index in range(count)}
        assert reduce_metrics(sums, ("value",), alone) == {"value": 1.0}
    assert sent == [2 * 69] * 2
