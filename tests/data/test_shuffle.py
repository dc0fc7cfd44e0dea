"""Shuffling in blocks: every sample once per epoch, neighbours stay close, and places are independent."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy
import pytest

from worldsize.data.order import Order
from worldsize.data.permutation import Shuffle, permute_positions

BILLION = 10**9


@pytest.mark.parametrize("length", [1, 2, 7, 64, 1000, 1003])
@pytest.mark.parametrize(("block", "window"), [(1, 64), (2, 1), (4, 3), (10, 7), (64, 2), (2000, 1)])
def test_every_sample_comes_once_an_epoch(length: int, block: int, window: int) -> None:
    shuffle = Shuffle(block=block, window=window)
    for seed in (0, 5):
        order = shuffle.permute_span(seed, length, range(length)).tolist()
        assert sorted(order) == list(range(length))
        assert [int(shuffle.permute_span(seed, length, range(place, place + 1))) for place in range(length)] == order


@pytest.mark.parametrize("length", [1, 2, 3, 5, 100])
def test_places_in_any_order_are_a_permutation_of_a_small_set(length: int) -> None:
    places = numpy.arange(length)[::-1].copy()
    assert sorted(Shuffle().permute_places(3, length, places).tolist()) == list(range(length))


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_all_orders_of_a_few_samples_are_equally_likely(length: int) -> None:
    """Pearson's chi-square over all permutations, with a bound at five standard deviations."""
    orders = math.factorial(length)
    seeds = 200 * orders
    numbers = numpy.arange(length)
    counts = Counter(tuple(permute_positions(seed, length, numbers).tolist()) for seed in range(seeds))
    assert len(counts) == orders
    chi_square = sum((count - 200) ** 2 / 200 for count in counts.values())
    assert abs(chi_square - (orders - 1)) < 5 * math.sqrt(2 * (orders - 1))


def test_blocks_are_read_together() -> None:
    """A window of 4 blocks of 100 samples touches 4 runs of the data, or 5 where one straddles its end."""
    shuffle = Shuffle(block=100, window=4)
    for first in range(0, 10_000, 400):
        window = sorted(shuffle.permute_span(9, 10_000, range(first, first + 400)).tolist())
        runs = 1 + sum(after - before > 1 for before, after in pairwise(window))
        assert runs <= 5


def test_samples_within_a_window_are_mixed() -> None:
    order = Shuffle(block=100, window=10).permute_span(9, 10_000, range(1000)).tolist()
    assert sum(after - before == 1 for before, after in pairwise(order)) < 10


def test_blocks_begin_elsewhere_in_each_epoch() -> None:
    """The last samples do not fill a block, and are drawn separately."""
    shuffle, last = Shuffle(block=10, window=2), range(1000, 1005)
    ends = {tuple(sorted(shuffle.permute_span(seed, 1005, last).tolist())) for seed in range(20)}
    assert len(ends) > 15


def test_samples_keep_their_order_if_shuffling_is_off() -> None:
    assert Order(0, 4, 1, (0,), shuffle=Shuffle(enabled=False)).compute_indices(3, 0, 10).tolist() == [8, 9, 0, 1]


def test_the_order_of_blocks_stays_what_it_is() -> None:
    """The manifest promises this order: a different one needs a new version number."""
    order = Order(7, 8, 2, (0, 1), shuffle=Shuffle(block=1000, window=4))
    assert order.compute_indices(1, 0, BILLION).tolist() == [395605113, 395604864, 454855679, 395604551]
    assert order.compute_indices(10**6, 1, BILLION).tolist() == [177028053, 712833514, 374270321, 95365298]
