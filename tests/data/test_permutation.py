"""Indices of large data sets are permuted one by one: each comes once, in an order as random as randperm's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch
from numpy.typing import NDArray

from worldsize.data.order import Order
from worldsize.data.permutation import ORDER, encipher_numbers, permute_range
from worldsize.seeds import derive_seed

BILLION = 10**9
Indices = NDArray[numpy.int64]


def numbers(length: int) -> NDArray[numpy.uint64]:
    return numpy.arange(length, dtype=numpy.uint64)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 17, 100, 1000, 4097, 65_536, 100_003])
def test_every_index_comes_once(length: int) -> None:
    for seed in range(3):
        assert sorted(encipher_numbers(seed, length, numbers(length))) == list(range(length))


def by_hand(seed: int, length: int, number: int) -> int:
    """Return one index by the definition, with Python's integers."""
    bits, word = max(2, (length - 1).bit_length()), (1 << 64) - 1
    small, large = bits // 2, bits - bits // 2
    while True:
        high, low = number >> small, number & ((1 << small) - 1)
        for round_ in range(8):
            mixed = (high if round_ % 2 else low) ^ derive_seed(seed, "round", round_)
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & word
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & word
            mixed ^= mixed >> 31
            if round_ % 2:
                low ^= mixed & ((1 << small) - 1)
            else:
                high ^= mixed & ((1 << large) - 1)
        number = (high << small) | low
        if number < length:
            return number


@pytest.mark.parametrize("length", [5_000_000, BILLION, 2**40 + 1])
def test_an_index_is_that_of_its_definition(length: int) -> None:
    first = length - 40
    expected = [by_hand(11, length, number) for number in range(first, length)]
    assert permute_range(11, length, range(first, length)).tolist() == expected


def test_the_order_stays_what_it_is() -> None:
    """A change draws different samples in every run: it needs a new version of ORDER."""
    large = Order(seed=7, batch_size=4, logical_ranks=1, mine=(0,))
    assert ORDER == 3
    assert large.compute_indices(1, 0, BILLION).tolist() == [772796075, 993611603, 780072317, 671900538]
    assert large.compute_indices(1, 0, 10).tolist() == [4, 2, 1, 3]


def test_the_order_of_a_small_data_set_is_that_of_torch() -> None:
    expected = torch.randperm(1000, generator=torch.Generator().manual_seed(derive_seed(7, "order", 2)))
    order = Order(seed=7, batch_size=100, logical_ranks=2, mine=(0, 1))
    assert torch.equal(order.compute_indices(21, 1, 1000), expected[50:100])


def test_an_epoch_ends_within_a_batch() -> None:
    order = Order(seed=7, batch_size=8, logical_ranks=1, mine=(0,))
    length = 5_000_001
    last, first = derive_seed(7, "order", 0), derive_seed(7, "order", 1)
    expected = [*permute_range(last, length, range(length - 1, length)), *permute_range(first, length, range(7))]
    assert order.compute_indices(625_001, 0, length).tolist() == [int(index) for index in expected]


LENGTH, SEEDS, CELLS = 1000, 1500, 20


def keyed(seed: int) -> Indices:
    return encipher_numbers(seed, LENGTH, numbers(LENGTH))


def shuffled(seed: int) -> Indices:
    order: Indices = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed)).numpy()
    return order


def excess(counts: NDArray[numpy.int64], freedom: int) -> float:
    """Return how many standard deviations Pearson's chi-square of equally likely cells is above its mean."""
    mean = counts.mean()
    return float((((counts - mean) ** 2).sum() / mean - freedom) / math.sqrt(2 * freedom))


@pytest.mark.parametrize("make", [keyed, shuffled])
def test_the_order_is_uniform(make: Callable[[int], Indices]) -> None:
    """The tests of one permutation generator hold for both; each bound is at four standard deviations."""
    orders = numpy.stack([make(seed) for seed in range(SEEDS)])
    places = numpy.broadcast_to(numpy.arange(LENGTH), orders.shape)
    cells = numpy.zeros((CELLS, CELLS), dtype=numpy.int64)  # which index comes where
    numpy.add.at(cells, (places * CELLS // LENGTH, orders * CELLS // LENGTH), 1)
    assert abs(excess(cells, (CELLS - 1) ** 2)) < 4

    pairs = numpy.zeros((CELLS, CELLS), dtype=numpy.int64)  # counts of consecutive index pairs
    numpy.add.at(pairs, (orders[:, :-1] * CELLS // LENGTH, orders[:, 1:] * CELLS // LENGTH), 1)
    assert abs(excess(pairs, (CELLS - 1) ** 2)) < 4

    bits = numpy.stack([(orders[:, :256] >> bit & 1).mean(axis=1) for bit in range(9)])  # low bits of the first quarter
    expected = numpy.array([(numpy.arange(LENGTH) >> bit & 1).mean() for bit in range(9)])
    deviation = numpy.sqrt(expected * (1 - expected) / 256 * (LENGTH - 256) / (LENGTH - 1) / SEEDS)
    assert (abs(bits.mean(axis=1) - expected) < 4 * deviation).all()

    fixed = (orders == places).sum(axis=1)  # Poisson, of mean and variance 1
    assert abs(fixed.mean() - 1) < 4 / math.sqrt(SEEDS)
    assert abs((fixed == 0).mean() - math.exp(-1)) < 4 * math.sqrt(math.exp(-1) * (1 - math.exp(-1)) / SEEDS)

    ascents = (orders[:, 1:] > orders[:, :-1]).sum(axis=1)  # mean (n - 1) / 2, variance (n + 1) / 12
    assert abs(ascents.mean() - (LENGTH - 1) / 2) < 4 * math.sqrt((LENGTH + 1) / 12 / SEEDS)
    assert 0.8 < ascents.var() / ((LENGTH + 1) / 12) < 1.2

    cycles = numpy.array([_cycles(order) for order in orders[:300]])  # mean the harmonic number, variance H - H2
    harmonic = sum(1 / n for n in range(1, LENGTH + 1))
    assert abs(cycles.mean() - harmonic) < 4 * math.sqrt((harmonic - math.pi**2 / 6) / 300)


def _cycles(order: Indices) -> int:
    seen, count = numpy.zeros(LENGTH, dtype=bool), 0
    for start in range(LENGTH):
        if not seen[start]:
            count += 1
            place = start
            while not seen[place]:
                seen[place] = True
                place = int(order[place])
    return count


def test_epochs_have_orders_of_their_own() -> None:
    orders = [permute_range(derive_seed(7, "order", epoch), 5_000_000, range(10_000)) for epoch in range(4)]
    for first, second in pairwise(orders):
        correlation = numpy.corrcoef(first.double(), second.double())[0, 1]
        assert abs(correlation) < 0.05
        assert len({*first.tolist()} & {*second.tolist()}) < 60  # 20 of 10,000 by chance


def test_a_billion_samples_take_no_memory() -> None:
    order = Order(seed=7, batch_size=4096, logical_ranks=8, mine=(3,))
    order.compute_indices(1, 3, BILLION)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    assert len(order.compute_indices(1_000_000, 3, BILLION)) == 512
    assert _status("VmHWM") - before < 1 << 20


def _status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
