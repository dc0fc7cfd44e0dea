"""Exact reductions over real gloo processes agree with fractions computed without rounding."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch

from worldsize.collectives.exact import exact_sum, reduce_metrics
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


def test_a_sum_beyond_floats_is_infinite_and_one_that_only_passes_beyond_them_is_exact() -> None:
    assert exact_sum([1e308, 1e308]) == math.inf
    assert exact_sum([-1e308, 1.0, -1e308]) == -math.inf
    assert exact_sum([1e308, 1e308, -1e308]) == exact_sum([1e308, -1e308, 1e308]) == 1e308
    assert exact_sum([math.inf, 1e308, 1e308]) == math.inf
    assert exact_sum([]) == 0
